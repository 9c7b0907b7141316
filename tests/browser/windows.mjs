// Whose status stands where: two windows with two workflows whose nodes have the same ids, two workflows in one window,
// and the notice of an error, which goes with its graph; classic canvas and Nodes 2.0.
import assert from "node:assert/strict";
import { loadWorkflow, openPage, showAll } from "./comfy.mjs";
import { openTab, part } from "./notices.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { ended, graphOf, queue, shrink, source } from "./running.mjs";

const MINE = "anygpu_ltx_text_to_video";
const OTHER = "anygpu_mochi_text_to_video"; // its first nodes have the ids of the same nodes of mine
const SHOTS = process.env.SHOTS; // a folder for screenshots

const shot = (page, name) => SHOTS && page.screenshot({ path: `${SHOTS}/${name}.png` });

/** Node id to the text under it, of the open graph. */
const texts = (page) =>
  page.evaluate(() => {
    const shown = window.app.graph._nodes.map((node) => [node.id, node.widgets?.find(({ name }) => name === "$$node-text-preview")?.value]);
    return Object.fromEntries(shown.filter(([, text]) => text));
  });

/** How many pictures stand in nodes: on the classic canvas, or as elements of Nodes 2.0, which leaves the canvas' own behind. */
const pictures = (page) =>
  page.evaluate(() => {
    const elements = document.querySelectorAll("[data-node-id]").length;
    if (elements) return document.querySelectorAll("[data-node-id] :is(img, video)").length;
    return window.app.graph._nodes.filter(({ imgs }) => imgs?.length).length;
  });

async function open(page, name) {
  await loadWorkflow(page, await source(name), name);
  await shrink(page, { width: 64, height: 64, frames: 9, steps: 2, seed: Date.now() % 1e9 });
}

/** A run of one window changes nothing in the other. */
async function oneWindowHears(mine, other, mode) {
  await open(mine, MINE);
  await open(other, OTHER);
  await openTab(other);
  const before = await part(other, "Last run").first().innerText();
  await other.evaluate(() => {
    window.heard = [];
    for (const kind of ["progress_text", "anygpu.run", "b_preview"]) window.app.api.addEventListener(kind, () => window.heard.push(kind));
  });
  await queue(mine);
  assert.equal((await ended(mine)).ending, "execution_success");
  for (let left = 50; Object.keys(await texts(mine)).length < 3 && left; left--) await mine.waitForTimeout(100);
  const shown = await texts(mine);
  assert.ok(Object.keys(shown).length >= 3, `a text under each node of ours that ran: ${JSON.stringify(shown)}`);
  await showAll(mine);
  await shot(mine, `${mode}_mine`);
  await shot(other, `${mode}_other`);
  assert.deepEqual(await texts(other), {}, "a text under a node of another workflow");
  assert.deepEqual(await other.evaluate(() => window.heard), []);
  await other.getByRole("button", { name: "Refresh" }).click();
  await other.waitForTimeout(1500);
  assert.equal(await part(other, "Last run").first().innerText(), before, "the tab shows another window's run");
  await other.locator("[aria-label^='AnyGPU: ']").click();
}

/** While one workflow runs another is opened in the same window: no text there; the first goes on when it is back. */
async function oneWorkflowShows({ page }, mode) {
  await open(page, MINE);
  await openTab(page);
  await shrink(page, { width: 512, height: 320, frames: 49, steps: 1000, seed: Date.now() % 1e9 });
  await queue(page);
  await page.waitForFunction(() => window.seen.progress.some(([value, max]) => max === 1000 && value >= 3));
  const running = await texts(page);
  assert.ok(Object.values(running).some((text) => text.includes("sampling")), JSON.stringify(running));
  assert.ok((await pictures(page)) > 0, "a preview where it runs");
  await open(page, OTHER);
  await page.waitForTimeout(3000);
  assert.deepEqual(await texts(page), {}, "the text of a workflow that is not open");
  assert.equal(await pictures(page), 0, "its preview");
  await part(page, "Last run").getByText("The last run was of another workflow.").waitFor();
  await showAll(page);
  await shot(page, `${mode}_switched`);
  assert.equal(await page.evaluate(() => window.seen.ending), null, "it ran too shortly to be seen");
  await page.evaluate(() => window.app.extensionManager.command.execute("Workspace.PreviousOpenedWorkflow"));
  await page.waitForFunction(() => window.app.graph._nodes.some((node) => node.widgets?.some(({ name, value }) => name === "$$node-text-preview" && value.includes("sampling"))));
  await part(page, "Last run").getByText(/, running/).first().waitFor();
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.Interrupt"));
  assert.equal((await ended(page)).ending, "execution_interrupted");
  await page.waitForTimeout(500); // core takes all texts away when a run ends, and ours come back
  assert.match(Object.values(await texts(page)).join(), /cancelled at sampling/);
  await page.locator("[aria-label^='AnyGPU: ']").click();
}

/** A new graph in the same workflow has nodes with the ids of the old ones, and none of their texts. */
async function clearedForgets({ page }) {
  await open(page, MINE);
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
  await page.evaluate(() => ((window.confirm = () => true), window.app.extensionManager.command.execute("Comfy.ClearWorkflow")));
  const pictures = [["EmptyImage", { color: Date.now() % 1e6 }], ["ImageInvert", {}, { image: [0, "IMAGE"] }], ["PreviewImage", {}, { images: [1, "IMAGE"] }]];
  await graphOf(page, pictures);
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
  await page.waitForTimeout(500);
  assert.deepEqual(await texts(page), {}, "texts of nodes that are gone");
}

const toast = (page) => page.locator(".anygpu-toast");
const gone = (page) => page.locator(".anygpu-toast[data-seen]").waitFor({ state: "detached" });

/** Fail, and wait for the notice; the next may be there before anybody saw that this one was gone. */
async function fail(page) {
  await shrink(page, { template: "none", seed: Date.now() % 1e9 });
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_error");
  await toast(page).evaluate((element) => (element.dataset.seen = ""));
}

async function noticeGoes({ page }) {
  await open(page, MINE);
  await fail(page);
  await page.mouse.click(1200, 820); // so that nothing has the focus
  await page.keyboard.press("Escape");
  await gone(page);
  await fail(page);
  await queue(page); // accepted, and fails again: another notice, of this run
  await gone(page);
  await toast(page).evaluate((element) => (element.dataset.seen = ""));
  await page.evaluate(() => {
    const sample = window.app.graph._nodes.find(({ type }) => type === "AnyGPUSample");
    sample.disconnectInput(sample.inputs.findIndex(({ name }) => name === "pipeline"));
  });
  await queue(page); // refused
  await gone(page);
  await open(page, MINE);
  await fail(page);
  await open(page, OTHER);
  await gone(page);
  await page.evaluate(() => window.app.extensionManager.command.execute("Workspace.PreviousOpenedWorkflow"));
  await page.waitForTimeout(1000);
  await fail(page);
  await page.evaluate(() => window.app.extensionManager.command.execute("Workspace.PreviousOpenedWorkflow"));
  await gone(page);
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.RightSidePanel.IsOpen", false));
}

/** An error of a workflow that is not open, and one of a node that is gone: named, and nowhere to go. */
async function noticeLeadsOnlyToItsNode({ page }) {
  await open(page, MINE);
  await page.evaluate(() => window.app.api.addEventListener("execution_start", ({ detail }) => (window.started = detail.prompt_id), { once: true }));
  await fail(page);
  assert.equal(await toast(page).getByRole("button", { name: /^Go to / }).count(), 1);
  const node = await page.evaluate(() => window.app.graph._nodes.find(({ type }) => type === "AnyGPUEncodePrompt").id);
  const error = (id) =>
    page.evaluate((found) => {
      const text = { exception_message: "a; expected b. c", exception_type: "anygpu.InputError", node_type: "AnyGPUEncodePrompt" };
      window.app.api.dispatchCustomEvent("execution_error", { ...text, prompt_id: window.started, node_id: String(found), traceback: [] });
    }, id);
  await error(99);
  await toast(page).getByText("Stopped: AnyGPU Encode Prompt").waitFor();
  assert.equal(await toast(page).getByRole("button", { name: /^Go to / }).count(), 0, "a node that is not in the graph");
  await open(page, OTHER);
  await error(node);
  await toast(page).getByText(MINE).waitFor();
  assert.equal(await toast(page).getByRole("button", { name: /^Go to / }).count(), 0, "a node of another workflow");
  await page.keyboard.press("Escape");
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.RightSidePanel.IsOpen", false));
}

/** In a window as narrow as a telephone half of the tab can be read, and Run be pressed. */
async function noticeLeavesRoom({ page }, mode) {
  await open(page, MINE);
  await page.setViewportSize({ width: 420, height: 900 });
  await openTab(page);
  await shot(page, `${mode}_420_before`);
  await fail(page);
  await page.waitForTimeout(1000);
  await shot(page, `${mode}_420_notice`);
  const [box, tab] = [await toast(page).boundingBox(), await page.locator(".anygpu-panel").boundingBox()];
  const visible = Math.min(900, tab.y + tab.height) - tab.y;
  const covered = Math.max(0, Math.min(box.y + box.height, tab.y + visible) - Math.max(box.y, tab.y));
  assert.ok(covered <= visible / 2, `${covered} of ${visible} pixels of the tab are covered`);
  assert.ok((await toast(page).getByText("Expected").count()) === 1 && box.height > 120, "the notice can be read");
  await page.locator("[aria-label^='AnyGPU: ']").click(); // beside the open tab ComfyUI itself leaves no room for Run
  await page.waitForTimeout(1000);
  await shot(page, `${mode}_420_run`);
  const free = await page.getByTestId("queue-button").first().evaluate((button) => {
    const { left, top, width, height } = button.getBoundingClientRect();
    return button.contains(document.elementFromPoint(left + width / 2, top + height / 2));
  });
  assert.ok(free, "Run is covered");
  await page.keyboard.press("Escape");
  await page.setViewportSize({ width: 1600, height: 900 });
}

for (const nodes2 of chosenModes()) {
  const checked = report(nodes2);
  const faults = [];
  const check = (title, act) => checked(title, act).catch(({ message }) => {
    console.log(`not ok  ${title}: ${message}`);
    faults.push(title);
  });
  const mode = nodes2 ? "nodes2" : "classic";
  const [mine, other] = [await openPage({ nodes2 }), await openPage({ nodes2 })];
  const warned = [];
  mine.page.on("console", (message) => /Unhandled message/.test(message.text()) && warned.push(message.text()));
  try {
    await check("a run is shown in the window that queued it alone", () => oneWindowHears(mine.page, other.page, mode));
    await other.browser.close();
    await check("a run is shown in the workflow that was queued alone", () => oneWorkflowShows(mine, mode));
    await check("a graph that was cleared leaves no texts behind", () => clearedForgets(mine));
    await check("a notice goes with Run, with its graph and on Escape", () => noticeGoes(mine));
    await check("a notice leads to no node but its own", () => noticeLeadsOnlyToItsNode(mine));
    await check("a notice leaves room in a narrow window", () => noticeLeavesRoom(mine, mode));
    assert.deepEqual(faults, [], "see above for what is wrong with these");
    const refused = /status of 400|PromptExecutionError/; // the Run that was meant to be
    const reported = [...mine.errors, ...other.errors, ...warned].filter((line) => !refused.test(line));
    assert.deepEqual(reported, [], "the page reported errors");
  } finally {
    await mine.browser.close();
    await other.browser.close();
  }
}
