// Writes tests/workflows/<name>.api.json: what the frontend posts to /prompt for each shipped workflow, with the hash
// of the file it was made from, for all of them or those named. Fails when the classic canvas and Nodes 2.0 disagree.
import { createHash } from "node:crypto";
import { mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { isDeepStrictEqual } from "node:util";
import { apiPrompt, loadWorkflow, openPage } from "./comfy.mjs";

const SOURCES = new URL("../../workflows/", import.meta.url);
const REPLAYS = new URL("../workflows/", import.meta.url);

/** Name to prompt of every workflow, as one mode of the frontend makes them. */
async function prompts(names, nodes2) {
  const { browser, page, errors } = await openPage({ nodes2 });
  try {
    const made = {};
    for (const name of names) {
      await loadWorkflow(page, await readFile(new URL(`${name}.json`, SOURCES), "utf8"), name);
      made[name] = await apiPrompt(page);
      if (errors.length) throw new Error(`${name}: ${errors.join("\n")}`);
    }
    return made;
  } finally {
    await browser.close();
  }
}

const only = process.argv.slice(2);
const all = (await readdir(SOURCES))
  .filter((file) => file.endsWith(".json"))
  .map((file) => file.slice(0, -5))
  .sort();
const names = all.filter((name) => !only.length || only.includes(name));
const [classic, modern] = [await prompts(names, false), await prompts(names, true)];
await mkdir(REPLAYS, { recursive: true });
for (const file of await readdir(REPLAYS)) {
  if (!all.includes(file.replace(/\.api\.json$/, ""))) await rm(new URL(file, REPLAYS));
}
for (const name of names) {
  if (!isDeepStrictEqual(classic[name], modern[name])) throw new Error(`${name}: Nodes 2.0 makes another prompt`);
  const source = (await readFile(new URL(`${name}.json`, SOURCES), "utf8")).replaceAll("\r\n", "\n");
  const hash = createHash("sha256").update(source).digest("hex");
  const text = JSON.stringify({ source_sha256: hash, prompt: classic[name] }, null, 1);
  await writeFile(new URL(`${name}.api.json`, REPLAYS), `${text}\n`);
  console.log(`${name}.api.json: ${Object.keys(classic[name]).length} nodes, the same in both modes`);
}
