// openai from npm: parsed calls and responses, whole and streamed, and its loop over tools. Prints what each read.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { QUESTION, SAMPLING, place } from "./asked.js";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "built-in", messages: [{ role: "user", content: QUESTION }], ...SAMPLING };
const called = {
  tools: [zodFunction({ name: "look", parameters: place })],
  tool_choice: "required",
  parallel_tool_calls: false,
};
const response_format = zodResponseFormat(place, "place");
const found = {};

const argumentsOf = (whole) => whole.choices[0].message.tool_calls[0].function.parsed_arguments;
found.called = argumentsOf(await client.chat.completions.parse({ ...asked, ...called }));
found["called streamed"] = argumentsOf(
  await client.chat.completions.stream({ ...asked, ...called }).finalChatCompletion(),
);
const done = [];
const calls = client.chat.completions.stream({ ...asked, ...called });
calls.on("tool_calls.function.arguments.done", (event) => done.push(event.parsed_arguments));
await calls.finalChatCompletion();
[found["called event"]] = done;

const parsed = await client.chat.completions.parse({ ...asked, response_format });
found.structured = parsed.choices[0].message.parsed;
const streamed = await client.chat.completions.stream({ ...asked, response_format }).finalChatCompletion();
found["structured streamed"] = streamed.choices[0].message.parsed;
console.log(JSON.stringify(found));
