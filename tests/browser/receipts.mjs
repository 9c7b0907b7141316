// What the tab makes of receipts, what changed since the sampling before, and the file of this machine to share.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { part, violations } from "./notices.mjs";
import { ended, queue, shrink } from "./running.mjs";

/** Two samplings that differ in seed and steps: the tab lists these two, and that a third with both as before is the same. */
export async function changesAreTold({ page }) {
  const run = part(page, "Last run");
  const changed = run.getByRole("region", { name: "What changed" });
  const seed = Date.now() % 1e9;
  for (const values of [{ seed, steps: 2 }, { seed: seed + 1, steps: 3 }]) {
    await shrink(page, values);
    await queue(page);
    assert.equal((await ended(page)).ending, "execution_success");
  }
  await changed.getByText("This changed:").waitFor();
  const rows = await changed.locator("tbody tr").allInnerTexts();
  assert.deepEqual(rows.map((row) => row.split(/\s+/)), [["steps", "2", "3"], ["seed", `${seed}`, `${seed + 1}`]]);
}

/** The file is shown whole before it is saved, and saved as it was shown; nothing leaves for another server. */
export async function machineIsShared({ page }) {
  const requests = [];
  page.on("request", (request) => requests.push(new URL(request.url())));
  const machine = part(page, "This machine");
  await machine.getByRole("button", { name: "Share this machine" }).click();
  const shown = await machine.getByLabel("The file", { exact: true }).textContent();
  assert.equal(JSON.parse(shown).anygpu_machine, 1);
  assert.deepEqual(await violations(page, ".anygpu-share"), []);
  const [download] = await Promise.all([
    page.waitForEvent("download"),
    machine.getByRole("button", { name: "Save the file" }).click(),
  ]);
  assert.equal(download.suggestedFilename(), "anygpu-machine.json");
  assert.equal(await readFile(await download.path(), "utf8"), shown);
  await machine.getByText("is in your browser's downloads").waitFor();
  const { host } = new URL(page.url());
  assert.deepEqual(requests.filter((url) => url.protocol !== "blob:" && url.host !== host).map(String), []);
}
