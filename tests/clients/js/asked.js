// As asked.py has it.
import { z } from "zod";

export const QUESTION = "Where is it?";
export const SAMPLING = { temperature: 0.8, seed: 5, max_tokens: 1000 };
export const place = z.object({
  name: z.string().max(8),
  side: z.enum(["left", "right"]),
  count: z.number().int().min(0).max(99),
});
