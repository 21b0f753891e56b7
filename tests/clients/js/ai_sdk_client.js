// Vercel's AI SDK over its providers for OpenAI's APIs. Prints what each read.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { QUESTION, place } from "./asked.js";

const baseURL = process.argv[2];
const models = {
  compatible: createOpenAICompatible({
    name: "stride",
    baseURL,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  })("built-in"),
  openai: createOpenAI({ baseURL, apiKey: "none" }).chat("built-in"),
  responses: createOpenAI({ baseURL, apiKey: "none" }).responses("built-in"),
};
const providerOptions = { openai: { parallelToolCalls: false }, stride: { parallel_tool_calls: false } };
const fail = ({ error }) => {
  throw error;
};
const found = {};
for (const [name, model] of Object.entries(models)) {
  const asked = { model, prompt: QUESTION, temperature: 0.8, seed: 5, maxOutputTokens: 1000, maxRetries: 0 };
  const told = { ...asked, schema: place, onError: fail };
  found[`${name} structured`] = (await generateObject(told)).object;
  const growing = streamObject(told);
  for await (const _ of growing.partialObjectStream);  // it does nothing unless it is read
  found[`${name} structured streamed`] = await growing.object;

  const one = { ...asked, toolChoice: "required", providerOptions, onError: fail };
  const stream = streamText({ ...one, tools: { look: tool({ inputSchema: place }) } });
  found[`${name} called streamed`] = (await stream.toolCalls)[0].input;
  const usage = await stream.usage;
  found[`${name} finish`] = [await stream.finishReason, usage.outputTokens > 0];

  const tools = { look: tool({ inputSchema: place, execute: async ({ side }) => `nothing on the ${side}` }) };
  const loop = await generateText({ ...one, tools, stopWhen: stepCountIs(5) });
  found[`${name} loop`] = loop.steps.map((step) => step.toolResults.length);
}
console.log(JSON.stringify(found));
