// Writes workflows/<name>.png, a picture of each shipped workflow on the canvas; drive.py makes small JPEGs of them,
// which the template browser shows. Names as arguments limit it to these.
import { readFile, readdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { loadWorkflow, openPage, showAll } from "./comfy.mjs";

const SOURCES = new URL("../../workflows/", import.meta.url);
const only = process.argv.slice(2);
const names = (await readdir(SOURCES))
  .filter((file) => file.endsWith(".json"))
  .map((file) => file.slice(0, -5))
  .filter((name) => !only.length || only.includes(name));

const { browser, page, errors } = await openPage({ width: 1360, height: 860 });
try {
  for (const name of names) {
    await loadWorkflow(page, await readFile(new URL(`${name}.json`, SOURCES), "utf8"), name);
    await page.evaluate(() => {
      for (const node of window.app.graph._nodes.filter(({ type }) => type === "MarkdownNote")) window.app.graph.remove(node);
    });
    await showAll(page, 20);
    const clip = { x: 60, y: 100, width: 1280, height: 720 };
    await page.screenshot({ path: fileURLToPath(new URL(`${name}.png`, SOURCES)), clip });
  }
  if (errors.length) throw new Error(errors.join("\n"));
  console.log(`${names.length} pictures`);
} finally {
  await browser.close();
}
