// Shipped workflows in ComfyUI's real frontend: found in the template browser, run, watched, cancelled, made to fail;
// classic canvas and Nodes 2.0. With --pictures it also writes the README's screenshots into docs/images/.
import assert from "node:assert/strict";
import { URL_OF_SERVER, loadWorkflow, openPage, showAll } from "./comfy.mjs";
import {
  errorsSayWhatToDo,
  examplesAreDrawn,
  firstRun,
  helpIsShown,
  markupIsText,
  memoryIsMended,
  pausesAndResumes,
  speaks,
  statusIsReadable,
  subgraphRuns,
  tabDecides,
  tabFollowsTheGraph,
  tabIsAccessible,
  tabKeepsToItself,
  tabRecordsNothing,
  tabShowsTheRun,
} from "./notices.mjs";
import { changesAreTold, machineIsShared } from "./receipts.mjs";
import { chosenModes, picture, report } from "./reporting.mjs";
import { browseTemplates, described, ended, names, queue, scrolledTo, shrink, source } from "./running.mjs";

async function templates({ page }, nodes2) {
  await browseTemplates(page);
  await picture(page, nodes2 ? null : "templates.png", { height: 900 });
  const [first] = described;
  for (const text of first.tags) await page.getByText(text, { exact: true }).first().waitFor();
  assert.equal(await page.getByText("anygpu_ltx_text_to_video", { exact: true }).count(), 0, "a file name for a title");
  for (const name of await names()) await (await scrolledTo(page, name)).waitFor();
  await page.keyboard.press("Escape");
}

async function runs({ page }, name, values) {
  await loadWorkflow(page, await source(name), name);
  await showAll(page);
  await shrink(page, values);
  const free = { method: "POST", body: JSON.stringify({ free_memory: true }) };
  await page.evaluate((request) => window.app.api.fetchApi("/free", request), free); // what is cached says nothing under its node
  await page.waitForTimeout(1000);
  await queue(page);
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_success", seen.message);
  assert.ok(seen.progress.length > 3 && seen.texts.length > 3, "no progress arrived");
  assert.ok(seen.animated > 0, "no animated preview of the clip");
  await page.waitForFunction(
    () => {
      const video = [...document.querySelectorAll("video")].find((each) =>
        /SaveVideo|video/.test(each.src + each.innerHTML),
      );
      return video && video.videoWidth === 256;
    },
    null,
    { timeout: 60000 },
  );
}

async function watches({ page }) {
  await shrink(page, { seed: 7, steps: 900 });
  await queue(page);
  await page.waitForFunction(() => window.seen.progress.some(([value, max]) => max === 900 && value >= 300), null, {
    timeout: 240000, // of 900 steps on a CPU that others use too
  });
  assert.equal((await ended(page)).ending, "execution_success");
}

async function cancels({ page }) {
  await shrink(page, { seed: 8, steps: 1000, width: 512, height: 320, frames: 49 });
  await queue(page);
  await page.waitForFunction(() => window.seen.progress.some(([value, max]) => max === 1000 && value >= 3), null, {
    timeout: 60000,
  });
  // Not timed: the page draws without a GPU here. That the server obeys within a second is shown in tests/host.
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.Interrupt"));
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_interrupted");
  await page.waitForFunction(() => Object.values(window.seen.under).some((text) => /^cancelled at sampling/.test(text)), null, { timeout: 60000 }); // the node says so
  const done = Math.max(...seen.progress.filter(([, max]) => max === 1000).map(([value]) => value));
  assert.ok(done < 500, `${done} of 1000 steps were made all the same`);
  await shrink(page, { seed: 9 });
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
}

for (const nodes2 of chosenModes()) {
  const check = report(nodes2);
  await check("without a model the demo model draws, and the load node says what to download", () => firstRun(nodes2));
  await check("what a template loads is drawn by a click", () => examplesAreDrawn(nodes2));
  await check("a run pauses after a step and goes on there", () => pausesAndResumes(nodes2));
  if (process.argv.includes("--first")) continue; // the first minutes alone
  // Without what earlier runs left, every node runs and shows its text.
  await fetch(`${URL_OF_SERVER}/free`, {
    method: "POST",
    body: JSON.stringify({ unload_models: true, free_memory: true }),
  });
  const open = await openPage({ nodes2 });
  try {
    await check("every workflow is in the template browser", () => templates(open, nodes2));
    await check("LTX-Video text to video runs to a video", () => runs(open, "anygpu_ltx_text_to_video", { seed: 1 }));
    await check("the status under a node is one short line, then others", () => statusIsReadable(open));
    await check("markup in a node's text is text", () => markupIsText(open));
    await check("progress and preview are shown", () => watches(open));
    await check("Cancel is obeyed and the next run works", () => cancels(open));
    await check("FramePack image to video runs to a video", () => runs(open, "anygpu_framepack_image_to_video", { seed: 1 }));
    await check("the tab tells what is decided before a run", () => tabDecides(open));
    await check("the tab follows the graph", () => tabFollowsTheGraph(open));
    await check("the tab shows the run and recovers its latents", () => tabShowsTheRun(open));
    await check("the tab offers what fits the graph and shows no prompt", () => tabKeepsToItself(open));
    await check("the tab tells what changed since the sampling before", () => changesAreTold(open));
    await check("this machine is shown, then saved as a file to share", () => machineIsShared(open));
    await check("the tab is accessible in both themes", () => tabIsAccessible(open));
    await check("each error says what to do and leads to its node", () => errorsSayWhatToDo(open));
    await check("out of memory of the host is mended by what the notice says", () => memoryIsMended(open));
    await check("the blueprint is found and runs", () => subgraphRuns(open));
    await check("the open tab makes no widget record or upload", () => tabRecordsNothing(open));
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await open.browser.close();
  }
  await check("the help of every node is shown, with its pictures", () => helpIsShown(nodes2));
  await check("names and tooltips in other languages", () => speaks(nodes2));
}
