// Asks the pack's routes.
import { api } from "../../scripts/api.js";

/** The JSON of a route. Throws the three parts of an error if the server refuses. */
export async function ask(path, body) {
  const sent = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await api.fetchApi(`/anygpu${path}`, sent);
  const found = await answer.json().catch(() => null);
  if (answer.ok && found) return found;
  const { found: what, expected, fix } = found?.error ?? { found: `the server answers ${answer.status}` };
  throw new Error([what, expected && `expected ${expected}`, fix].filter(Boolean).join("; "));
}
