// The side bar tab, the notices of errors, what the load node says without a model, and what axe-core says of them.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdir, readFile, readdir, rename, rm, rmdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";
import { loadWorkflow, openPage, showAll } from "./comfy.mjs";
import { picture } from "./reporting.mjs";
import { ended, listen, queue, shrink, source } from "./running.mjs";
import { isTidy } from "./tidy.mjs";

const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const SERIOUS = ["serious", "critical"];
const LIMIT = 120 * 2 ** 20; // bytes that the server may still take: a tiny model fits, a long video of it does not

/** Serious violations that axe-core finds in what `selector` matches, in the theme that is on. */
export async function violations(page, selector) {
  await page.addScriptTag({ path: AXE });
  const found = await page.evaluate(async (place) => {
    const { violations: list } = await window.axe.run(place, { resultTypes: ["violations"] });
    return list.map(({ id, impact, nodes }) => ({ id, impact, html: nodes.slice(0, 2).map((node) => node.html.slice(0, 160)) }));
  }, selector);
  return found.filter(({ impact }) => SERIOUS.includes(impact));
}

async function inBothThemes(page, act) {
  for (const theme of ["light", "dark"]) {
    await page.evaluate((id) => window.app.extensionManager.setting.set("Comfy.ColorPalette", id), theme);
    await page.waitForTimeout(400);
    await act(theme);
  }
}

/** Requests to the pack's routes and files that the page has made since `watch` was called. */
function watch(page) {
  const seen = [];
  page.on("request", (request) => {
    const { pathname } = new URL(request.url());
    if (/^\/(api\/)?(extensions\/)?anygpu\//.test(pathname)) seen.push(`${request.method()} ${pathname}`);
  });
  return seen;
}

const panel = (page) => page.locator(".anygpu-panel");
export const part = (page, title) => panel(page).locator("details").filter({ has: page.getByRole("heading", { name: title }) });

/** Open a part of the tab that is folded at first. */
const unfold = (details) => details.first().evaluate((element) => (element.open = true));

/** Open the tab the way its button does, and wait until the machine is there. */
export async function openTab(page) {
  if (!(await panel(page).isVisible().catch(() => false))) await page.locator("[aria-label^='AnyGPU: ']").click();
  await part(page, "This graph").locator("article").first().waitFor();
  for (const title of ["Last run", "Saved latents", "This machine"]) await unfold(part(page, title));
  await part(page, "This graph").locator("article details").evaluateAll((all) => all.forEach((each) => (each.open = true)));
}

/** A widget of core that records or uploads when a prompt is made: the open tab makes none by itself, only when asked. */
export async function tabRecordsNothing({ page }) {
  await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
  await openTab(page);
  await page.evaluate(() => {
    const node = window.LiteGraph.createNode("WebcamCapture");
    window.app.graph.add(node);
    window.made = 0;
    for (const widget of node.widgets) widget.serializeValue = () => String((window.made += 1));
  });
  const changed = async () => {
    await page.evaluate(() => window.comfyAPI.api.api.dispatchEvent(new Event("graphChanged")));
    await page.waitForTimeout(1500);
    return page.evaluate(() => window.made);
  };
  assert.equal(await changed(), 0, "of a graph that records, the tab asked by itself");
  await part(page, "This graph").getByText("Press Refresh: this graph records or draws.").waitFor();
  await page.getByRole("button", { name: "Refresh" }).click();
  await part(page, "This graph").locator("article").first().waitFor();
  const pressed = await page.evaluate(() => window.made);
  assert.ok(pressed > 0, "Refresh asks");
  await page.evaluate(() => {
    const { graph } = window.app;
    for (const node of [...graph._nodes]) if (node.type.startsWith("AnyGPU")) graph.remove(node);
  });
  assert.equal(await changed(), pressed, "of a graph without our nodes");
  await part(page, "This graph").getByText("This graph has no AnyGPU node that loads a model.").waitFor();
}

export async function tabDecides({ page }) {
  const asked = watch(page);
  await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
  await page.waitForTimeout(1500);
  assert.deepEqual(asked, [], "something was fetched before the tab was opened");
  await openTab(page);
  const graph = part(page, "This graph");
  const verdict = await graph.locator(".anygpu-verdict").first().textContent();
  assert.match(verdict, /^(Fits|Too much)\b.* GB .*free/, "the verdict is said first, in one line");
  for (const subject of ["precision", "offload", "attention", "Conv3d"]) {
    await graph.getByText(subject, { exact: true }).first().waitFor();
  }
  await graph.getByText("a CPU computes fp32").first().waitFor();
  await part(page, "This machine").getByRole("button", { name: /Run the probes/ }).click();
  await page.getByText("All probes have run.").waitFor();
  await part(page, "This machine").getByText(/0 not tested/).first().waitFor();
}

export async function tabFollowsTheGraph({ page }) {
  await shrink(page, { offload: "sequential" });
  await page.getByRole("button", { name: "Refresh" }).click();
  await part(page, "This graph").getByText("offload 'sequential' on a CPU").first().waitFor();
  await shrink(page, { offload: "auto" });
}

export async function tabShowsTheRun({ page }) {
  const seed = Date.now() % 1e9; // what ran before would not run again
  await shrink(page, { seed });
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
  const run = part(page, "Last run");
  await run.getByText("sampling", { exact: true }).first().waitFor();
  await run.getByText(/256x160, 25 frames at .*offload/).first().waitFor();
  const kept = part(page, "Saved latents");
  await kept.getByRole("button", { name: "Recover" }).first().waitFor();
  const forecast = await part(page, "This graph").locator("tbody th").allTextContents();
  assert.deepEqual(forecast, ["text", "sampling", "decoding"], "a stage of this workflow each");
  for (const stage of forecast) await run.getByRole("rowheader", { name: `${stage}, comfyui` }).waitFor();
  const before = await page.evaluate(() => window.app.graph._nodes.length);
  await kept.getByRole("button", { name: "Recover" }).first().click();
  await page.waitForFunction((count) => window.app.graph._nodes.length > count, before, { timeout: 30000 }).catch(async () => {
    throw new Error(`nothing was recovered: ${await kept.getByRole("status").allTextContents()}`);
  });
  const chosen = await page.evaluate(() => {
    const node = window.app.graph._nodes.find((each) => each.type === "AnyGPURecoverLatents");
    return node?.widgets.find((widget) => widget.name === "kept")?.value;
  });
  assert.ok(chosen.includes(`_ltx_${seed}_`), "the node loads the latent that was chosen");
  await page.evaluate(() => {
    const { graph, canvas } = window.app;
    const { node } = graph.convertToSubgraph(new Set(graph._nodes.filter(({ type }) => type === "AnyGPUDecode")));
    canvas.openSubgraph(node.subgraph, node);
  });
  await kept.getByRole("button", { name: "Recover" }).first().click();
  await page.waitForFunction(() => window.app.canvas.subgraph?._nodes.some(({ type }) => type === "AnyGPURecoverLatents"), null, { timeout: 30000 });
}

/** What was kept of other families is folded away, and no prompt is shown before it is asked for. */
export async function tabKeepsToItself({ page }) {
  const kept = part(page, "Saved latents").first();
  const titles = await kept.locator(":scope > .anygpu-body > article h3").allTextContents();
  assert.ok(titles.length > 0 && titles.every((title) => title.includes(" ltx,")), `of the model in the graph: ${titles}`);
  assert.equal(await kept.locator("article details[open]").count(), 0, "a prompt is shown");
}

export async function tabIsAccessible({ page }) {
  await inBothThemes(page, async (theme) => {
    assert.deepEqual(await violations(page, ".anygpu-panel"), [], `axe-core in the ${theme} theme`);
  });
  const summary = part(page, "Last run").locator("summary").first();
  await summary.focus();
  await page.keyboard.press("Enter");
  assert.equal(await part(page, "Last run").first().getAttribute("open"), null, "Enter closes a part");
  await page.keyboard.press("Enter");
  await page.locator("[aria-label^='AnyGPU: ']").click();
}

/** What the notice says. */
export async function notice(page) {
  const toast = page.locator(".anygpu-toast");
  await toast.waitFor();
  const rows = await toast.locator("dt").allTextContents();
  const texts = await toast.locator("dd").allTextContents();
  return Object.fromEntries(rows.map((name, index) => [name, texts[index]]));
}

const MISTAKES = [
  [{ template: "none" }, "AnyGPUEncodePrompt", "a template with 0 places for the prompt", "Write {}"],
  [{ offload: "group" }, "AnyGPULoadPipeline", "offload 'group' on a CPU", "Choose auto"],
  [{ precision: "fp16-safe" }, "AnyGPULoadPipeline", "precision 'fp16-safe' on a CPU", "Choose auto"],
  [{ variant: "framepack_f1" }, "AnyGPULoadPipeline", "variant 'framepack_f1' for LTX-Video", "Choose auto"],
  [{ cfg_start: 0.9, cfg_end: 0.1 }, "AnyGPUSample", "cfg_start 0.9 after cfg_end 0.1", "Swap them."],
  [{ steps: 1 }, "AnyGPUSample", "steps 1", "Set steps to 2 or more."],
];

export async function errorsSayWhatToDo({ page }) {
  for (const [index, [mistake, type, found, fix]] of MISTAKES.entries()) {
    await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
    await shrink(page, { seed: 30 + index, ...mistake });
    await queue(page);
    assert.equal((await ended(page)).ending, "execution_error");
    const said = await notice(page);
    assert.ok(said.Found.startsWith(found), `${found}: ${JSON.stringify(said)}`);
    assert.ok(said.Expected && said.Do.startsWith(fix), JSON.stringify(said));
    await page.getByTestId("error-overlay-dismiss").waitFor({ state: "detached" }); // ComfyUI's notice of the same error
    const jump = page.locator(".anygpu-toast").getByRole("button", { name: /^Go to / });
    await jump.focus();
    await page.keyboard.press("Enter");
    const selected = await page.evaluate(() => Object.values(window.app.canvas.selected_nodes ?? {}).map((node) => node.type));
    assert.deepEqual(selected, [type], "the button selects the node");
    if (index === 0) {
      await inBothThemes(page, async (theme) => {
        assert.deepEqual(await violations(page, ".anygpu-toast"), [], `axe-core in the ${theme} theme`);
      });
    }
    await page.locator(".anygpu-toast").getByRole("button", { name: "Close" }).click();
    await page.locator(".anygpu-toast").waitFor({ state: "detached" });
  }
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.RightSidePanel.IsOpen", false));
}

/** Let the server take `more` bytes beyond what it has, or as many as it wants; false where that cannot be done. */
async function limit(more) {
  const pid = process.env.COMFYUI_PID;
  try {
    const status = await readFile(`/proc/${pid}/status`, "utf8");
    const size = Number(/VmSize:\s+(\d+)/.exec(status)[1]) * 1024;
    execFileSync("prlimit", ["--pid", pid, `--as=${more === null ? "unlimited" : size + more}:`], { stdio: "ignore" });
    return true;
  } catch {
    return false;
  }
}

/** Run out of memory, do what the notice says, and again, until the video is there. */
export async function memoryIsMended({ page }) {
  await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
  await shrink(page, { seed: 40, frames: 9, width: 64, height: 64 });
  await queue(page); // loads what it needs before the limit
  assert.equal((await ended(page)).ending, "execution_success");
  if (!(await limit(LIMIT))) {
    console.log("--  this machine cannot limit a process: running out of memory was not tried");
    return;
  }
  try {
    let asked = { seed: 41, frames: 97, width: 640, height: 384, steps: 2, method: "full" };
    for (let attempt = 0; ; attempt += 1) {
      await shrink(page, asked);
      await queue(page);
      if ((await ended(page)).ending === "execution_success") {
        assert.ok(attempt > 0, "it never ran out of memory");
        break;
      }
      const said = await notice(page);
      assert.match(said.Found, /^out of memory while (sampling|decoding) \d+x\d+, \d+ frames on CPU \(/);
      assert.ok(attempt < 6, `following the notice did not help: ${JSON.stringify(said)}`);
      const fewer = /lower frames from \d+ to (\d+)/i.exec(said.Lower);
      const smaller = /lower width and height from \d+x\d+ to (\d+)x(\d+)/i.exec(said.Lower);
      assert.ok(fewer || smaller, said.Lower);
      asked = { ...asked, ...(fewer ? { frames: Number(fewer[1]) } : { width: Number(smaller[1]), height: Number(smaller[2]) }) };
    }
  } finally {
    await limit(null);
  }
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.RightSidePanel.IsOpen", false));
}

/** The button names the model of the workflow, says what its download means, and queues it; there is no network here. */
async function downloads(page) {
  await page.getByRole("button", { name: "Download LTX-Video…" }).evaluate((button) => button.click());
  const dialog = page.getByRole("dialog").filter({ hasText: "Download LTX-Video" });
  assert.match(await dialog.textContent(), /28 GB to download.* GB free on the disk.*huggingface\.co\/Lightricks\/LTX-Video .*licences/s);
  await dialog.getByRole("button", { name: "Confirm" }).click();
  const said = await notice(page);
  assert.match(said.Found, /^https:..huggingface.co.Lightricks.LTX-Video cannot be reached/);
  assert.match(said.Do, /^Go online and run again to resume/);
}

/** Run an LTX-Video workflow without LTX-Video, as it is: the demo model draws in its place, and the nodes say so. */
async function drawsAtOnce(page, nodes2) {
  await page.evaluate(() => fetch("/free", { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) }));
  await queue(page);
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_success", seen.message);
  for (const said of ["in place of 'LTX-Video'", "draws at its own size: width 704", "draws 'a red circle moves left on blue' instead"]) {
    assert.ok(seen.texts.some((text) => text.replaceAll("&#39;", "'").includes(said)), `${said} in ${seen.texts}`);
  }
  await page.waitForFunction(() => [...document.querySelectorAll("video")].some((video) => video.videoWidth === 64), null, { timeout: 60000 });
  await showAll(page);
  const place = (found) => found.first().boundingBox();
  const above = await place(page.getByRole("button", { name: "Copy what to download" }));
  const below = await place(page.getByText(/^demo model in place of 'LTX-Video'/));
  assert.ok(above.y + above.height <= below.y + 1, "the text lies on the button");
  await isTidy(page, nodes2, "first_run", "after");
  await picture(page, nodes2 ? "first_run_nodes2.png" : "first_run.png");
}

/** App mode shows no node: a notice says what was drawn instead, and the button of an error leads to its node. */
async function tellsInAppMode(page) {
  await page.evaluate(() => fetch("/free", { method: "POST", body: JSON.stringify({ unload_models: true, free_memory: true }) }));
  await loadWorkflow(page, await source("anygpu_ltx_text_to_video.app"), "anygpu_ltx_text_to_video.app");
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
  const told = page.locator(".anygpu-toast");
  await told.getByText("draws 'a red circle moves left on blue' instead").waitFor();
  await told.getByText("draws at its own size: width 704").waitFor();
  await shrink(page, { seed: 78 }); // the text is not encoded again
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
  await told.getByText("draws 'a red circle moves left on blue' instead").waitFor();
  await loadWorkflow(page, await source("anygpu_hunyuan_video_text_to_video"), "anygpu_hunyuan_video_text_to_video");
  assert.equal(await told.count(), 0, "the notice stays with its graph");
  await page.evaluate(() => {
    window.app.graph._nodes.find(({ type }) => type === "AnyGPULoadPipeline").widgets[0].value = "gone";
    return window.app.extensionManager.command.execute("Comfy.ToggleLinear");
  });
  await queue(page);
  await ended(page);
  await page.getByRole("button", { name: "Go to AnyGPU Load Pipeline" }).evaluate((button) => button.click()); // the frontend's own tour is over it
  await page.waitForFunction(() => {
    const { canvas } = window.app;
    const [node] = Object.values(canvas.selected_nodes);
    const middle = canvas.canvas.getBoundingClientRect().width / 2;
    return node && middle && Math.abs((node.pos[0] + node.size[0] / 2 + canvas.ds.offset[0]) * canvas.ds.scale - middle) < 50;
  });
}

/** The same, as it looks in a smaller window and in a narrow one, with the tab open. */
async function looksRight(page, nodes2) {
  if (nodes2) return;
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.ColorPalette", "light"));
  await page.setViewportSize({ width: 1280, height: 800 });
  await showAll(page);
  await page.evaluate(() => {
    const { ds } = window.app.canvas; // near enough that texts are drawn: from the prompt on
    const first = window.app.graph._nodes.find(({ type }) => type === "AnyGPUEncodePrompt");
    ds.scale = 0.72;
    ds.offset[0] = 100 / ds.scale - first.pos[0];
    ds.offset[1] = 190 / ds.scale - first.pos[1];
    window.app.canvas.setDirty(true, true);
  });
  await picture(page, "first_run_1280.png", { height: 800 });
  await page.setViewportSize({ width: 420, height: 800 });
  await page.locator("[aria-label^='AnyGPU: ']").click();
  await part(page, "This graph").locator("article").first().waitFor();
  await picture(page, "panel_420.png", { height: 800 });
  const { width } = await panel(page).boundingBox();
  assert.ok(width > 200 && width <= 420, `the tab is ${width} pixels wide in a window of 420`);
  assert.ok(await panel(page).evaluate((element) => element.scrollWidth <= element.clientWidth + 1), "it scrolls sideways");
  await page.locator("[aria-label^='AnyGPU: ']").click();
  await page.evaluate(() => window.app.extensionManager.setting.set("Comfy.ColorPalette", "dark"));
  await page.setViewportSize({ width: 1600, height: 900 });
}

/**
 * With every model taken away: the load node says what to download; a workflow that a demo model can draw runs with it,
 * another says which files it needs.
 */
export async function firstRun(nodes2) {
  const models = join(process.env.COMFYUI_BASE, "models", "diffusers");
  await rename(models, `${models}.away`);
  await mkdir(models);
  const open = await openPage({ nodes2 });
  const { page } = open;
  try {
    await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
    await showAll(page);
    const area = page.locator(".anygpu-first p");
    await area.waitFor();
    assert.match(await area.textContent(), /^No model yet\. Workflows of LTX-Video, .* run at once: a small demo model .*\nThe smallest that fits this machine .*14 GB of weights in bf16\.$/);
    await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
    await page.getByRole("button", { name: "Copy what to download" }).evaluate((button) => button.click()); // small on the canvas
    await page.getByRole("button", { name: "Copied" }).waitFor();
    const text = await page.evaluate(() => navigator.clipboard.readText());
    for (const wanted of [models, "https://huggingface.co/Lightricks/LTX-Video", "LTX-Video, 28 GB to download, 14 GB of weights", "a small demo model draws"]) {
      assert.ok(text.includes(wanted), `${wanted} in ${text}`);
    }
    assert.ok((await area.boundingBox()).height > 40, "the text can be read");
    assert.deepEqual(await violations(page, ".anygpu-first"), []);
    const sent = await page.evaluate(async () => (await window.app.graphToPrompt()).output);
    const loader = Object.values(sent).find((node) => node.class_type === "AnyGPULoadPipeline");
    assert.ok(!("anygpu_first_steps" in loader.inputs), "what is shown is not sent");
    await downloads(page);
    await drawsAtOnce(page, nodes2);
    await looksRight(page, nodes2);
    await tellsInAppMode(page);
    await loadWorkflow(page, await source("anygpu_hunyuan_video_15_image_to_video"), "anygpu_hunyuan_video_15_image_to_video");
    await queue(page);
    assert.equal((await ended(page)).ending, "execution_error");
    const said = await notice(page);
    assert.ok(said.Found.startsWith("no model 'HunyuanVideo-1.5-Diffusers-480p_i2v'"), JSON.stringify(said));
    assert.ok(/^Download https:..huggingface.co.hunyuanvideo-community.HunyuanVideo-1.5-Diffusers-480p_i2v .* into .*AnyGPU Download Model/.test(said.Do), JSON.stringify(said));
    assert.deepEqual(open.errors, [], "the page reported errors");
  } finally {
    await open.browser.close();
    await rmdir(models);
    await rename(`${models}.away`, models);
  }
}

/** Where the input folder has no example, as with --base-directory, a template offers to draw it, and then runs. */
export async function examplesAreDrawn(nodes2) {
  const input = join(process.env.COMFYUI_BASE, "input");
  await rename(input, `${input}.away`);
  await mkdir(input);
  const { browser, page, errors } = await openPage({ nodes2 });
  try {
    const dialog = page.getByRole("dialog").filter({ hasText: "Example files" });
    const error = { found: "ComfyUI's input folder: no room", expected: "room for two small files", fix: "Make room." };
    await page.route("**/anygpu/examples", (route) => route.fulfill({ status: 400, json: { error } }), { times: 1 });
    await loadWorkflow(page, await source("anygpu_ltx_video_to_video"), "anygpu_ltx_video_to_video");
    await dialog.getByRole("button", { name: "Confirm" }).click();
    await page.getByText("ComfyUI's input folder: no room").first().waitFor(); // said, not lost
    await loadWorkflow(page, await source("anygpu_ltx_video_to_video"), "anygpu_ltx_video_to_video");
    assert.match(await dialog.textContent(), /has no example\.mp4\./);
    await dialog.getByRole("button", { name: "Confirm" }).click();
    await page.waitForFunction(() => window.app.graph._nodes.some(({ type, widgets }) => type === "LoadVideo" && widgets[0].options.values.includes("example.mp4")));
    await shrink(page, { seed: nodes2 ? 81 : 82 });
    await queue(page);
    const { ending, message } = await ended(page);
    assert.equal(ending, "execution_success", message);
    await rm(join(input, "example.png"));
    await page.evaluate(() => window.app.refreshComboInNodes());
    await loadWorkflow(page, await source("anygpu_ltx_image_to_video"), "anygpu_ltx_image_to_video");
    await dialog.getByRole("button", { name: "Confirm" }).click();
    await page.waitForFunction(() => window.app.graph._nodes.find(({ type }) => type === "LoadImage").imgs?.length);
    await page.waitForTimeout(1000);
    const missing = page.getByText(/^(Issues|Media input missing)$/).filter({ visible: true });
    assert.deepEqual(await missing.allTextContents(), [], "the picture that was drawn still counts as missing");
    assert.deepEqual(errors.filter((each) => !each.includes("status of 400")), [], "the page reported errors");
  } finally {
    await browser.close();
    await rm(input, { recursive: true });
    await rename(`${input}.away`, input);
  }
}

/** The run pauses after a step, is listed with a picture, and goes on there when it is resumed. */
export async function pausesAndResumes(nodes2) {
  const { browser, page, errors } = await openPage({ nodes2 });
  try {
    await loadWorkflow(page, await source("anygpu_ltx_text_to_video"), "anygpu_ltx_text_to_video");
    await shrink(page, { steps: 400, seed: nodes2 ? 71 : 72 });
    await page.locator("[aria-label^='AnyGPU: ']").click();
    await queue(page);
    await page.getByRole("button", { name: "Pause after this step" }).click();
    const { ending, texts } = await ended(page);
    assert.equal(ending, "execution_interrupted");
    assert.ok(texts.some((text) => /^paused at sampling \d+\/400/.test(text)), JSON.stringify(texts));
    const cards = part(page, "Paused runs").locator("article");
    const done = Number(/^Paused after sampling (\d+)\/400$/.exec(await cards.first().locator("h3").textContent())[1]);
    await cards.first().locator("img").waitFor();
    const model = join(process.env.COMFYUI_BASE, "models", "diffusers", "LTX-Video");
    await rename(model, `${model}.away`);
    await listen(page);
    await cards.first().getByRole("button", { name: "Resume" }).click();
    assert.equal((await ended(page)).ending, "execution_error");
    await rename(`${model}.away`, model);
    await page.waitForTimeout(2000);
    await cards.first().getByRole("button", { name: "Resume", disabled: false }).waitFor(); // what could not go on is still there
    await listen(page);
    await cards.first().getByRole("button", { name: "Resume" }).click();
    const resumed = await ended(page);
    assert.equal(resumed.ending, "execution_success", resumed.message);
    assert.ok(resumed.texts.some((text) => text.includes(`goes on after step ${done} of 400`)), JSON.stringify(resumed.texts));
    await cards.first().waitFor({ state: "detached" });
    assert.deepEqual(errors, [], "the page reported errors");
  } finally {
    await browser.close();
  }
}

/** The node's title and an input's label in two languages; help in English in one that has none. */
export async function speaks(nodes2) {
  for (const locale of ["fr", "ko"]) {
    const file = new URL(`../../locales/${locale}/nodeDefs.json`, import.meta.url);
    const expected = JSON.parse(await readFile(file, "utf8")).AnyGPUSample;
    const { browser, page, errors } = await openPage({ locale, nodes2 });
    try {
      const found = await page.evaluate(() => {
        const node = window.LiteGraph.createNode("AnyGPUSample");
        window.app.graph.add(node);
        return { title: node.title, labels: node.widgets.map(({ label, name }) => label ?? name) };
      });
      assert.equal(found.title, expected.display_name);
      assert.ok(found.labels.includes(expected.inputs.steps.name), `${expected.inputs.steps.name} in ${found.labels}`);
      assert.deepEqual(errors, [], "the page reported errors");
    } finally {
      await browser.close();
    }
  }
  const { browser, page } = await openPage({ locale: "es", nodes2 });
  try {
    const help = await openHelp(page, "AnyGPUSample");
    await help.getByRole("heading", { name: "Who uses what" }).waitFor();
  } finally {
    await browser.close();
  }
}

/** The texts of the nodes' elements, once one of them passes the test: a run may end before its texts are drawn. */
async function drawnTexts(page, test, what) {
  for (let left = 600; left; left--) {
    const texts = await page.locator(".lg-node, .dom-widget, [class*=widget]").evaluateAll((all) => all.map((each) => each.innerText ?? ""));
    if (texts.some(test)) return texts;
    await page.evaluate(() => window.app.canvas.setDirty(true, true)); // an idle canvas draws when the pointer moves
    await page.waitForTimeout(100);
  }
  assert.fail(what);
}

/** The text under the load node: a short line first, each further one below it, in both canvas modes. */
export async function statusIsReadable({ page }) {
  const linesOf = (text) => text.split("\n").map((each) => each.trim());
  const hasLine = (text) => linesOf(text).includes("LTX-Video, dev: fp32, offload comfyui, on CPU");
  const shown = (await drawnTexts(page, hasLine, "no status line by itself")).filter(hasLine).map(linesOf);
  const lines = shown.sort((one, other) => one.length - other.length)[0].filter(Boolean);
  assert.ok(lines.some((each) => each.startsWith("attention")), `each line below another: ${JSON.stringify(lines)}`);
}

/** Characters of HTML and Markdown in a node's text stand there as themselves, in both canvases. */
export async function markupIsText({ page }) {
  await shrink(page, { seed: 6, frames: 26 });
  await queue(page);
  assert.equal((await ended(page)).ending, "execution_success");
  const texts = await drawnTexts(page, (text) => text.includes("frames 26 → 33"), "an arrow is shown");
  assert.ok(!texts.some((text) => /&#\d+;/.test(text)), "an entity is shown");
}

/** The help of each node, opened by the button over the selected node: not wider than the pane, with its pictures. */
export async function helpIsShown(nodes2) {
  const folder = new URL("../../web/docs/", import.meta.url);
  const { browser, page, errors } = await openPage({ nodes2 });
  try {
    for (const type of (await readdir(folder)).sort()) {
      const text = await readFile(new URL(`${type}/en.md`, folder), "utf8");
      const help = await openHelp(page, type);
      await help.getByRole("heading", { name: /^# (.+)$/m.exec(text)[1], exact: true }).waitFor();
      const wide = await help.evaluate((pane) => {
        const { right } = pane.getBoundingClientRect();
        return [...pane.querySelectorAll("*")].filter((part) => part.getBoundingClientRect().right > right + 1).map((part) => part.textContent.slice(0, 60));
      });
      assert.deepEqual(wide, [], `${type}: sticks out of the pane`);
      if (!text.includes("![")) continue;
      const pictures = help.locator(`img[src*="/docs/${type}/"]`);
      await pictures.first().scrollIntoViewIfNeeded();
      await page.waitForFunction((kind) => [...document.querySelectorAll(`img[src*="/docs/${kind}/"]`)].every((each) => each.naturalWidth > 0), type);
      assert.equal(await pictures.count(), text.split("![").length - 1, type);
      await page.evaluate(() => window.app.canvas.deselectAll());
    }
    assert.deepEqual(errors, [], "the page reported errors");
  } finally {
    await browser.close();
  }
}

/** Select a new node of a type, alone in the graph, and press the help button over it. */
async function openHelp(page, type) {
  await page.evaluate((kind) => {
    const { app, LiteGraph } = window;
    app.graph.clear();
    const node = LiteGraph.createNode(kind);
    app.graph.add(node);
    node.pos = [0, 0];
    app.canvas.selectNode(node, false);
    app.canvas.centerOnNode(node);
    app.canvas.setDirty(true, true);
  }, type);
  await page.getByTestId("info-button").click();
  return page.locator(".node-help-content");
}

/** Found by its name in the node search, placed, and run to a video. */
export async function subgraphRuns({ page }) { // alone: it saves what it makes
  await page.evaluate(() => window.app.graph.clear());
  await page.evaluate(() => window.app.canvas.setDirty(true, true));
  await page.mouse.dblclick(900, 450);
  await page.waitForFunction(() => document.activeElement?.tagName === "INPUT");
  await page.keyboard.type("Any model to video", { delay: 20 });
  await page.getByText("Any model to video").first().waitFor();
  const placed = () => page.evaluate(() => window.app.graph._nodes.some((node) => node.subgraph));
  for (let tries = 0; tries < 20 && !(await placed()); tries++) { // until the search has marked its first entry
    await page.waitForTimeout(800);
    await page.keyboard.press("Enter");
  }
  await page.waitForFunction(() => window.app.graph._nodes.some((node) => node.subgraph));
  await page.evaluate(() => {
    const { app } = window;
    const node = app.graph._nodes.find((each) => each.subgraph);
    const wanted = { model: "LTX-Video", text: "a cat", width: 64, height: 64, frames: 9, steps: 2, seed: Date.now() % 1e6 };
    for (const widget of node.widgets) if (widget.name in wanted) widget.value = wanted[widget.name];
  });
  await queue(page);
  const seen = await ended(page);
  assert.equal(seen.ending, "execution_success", seen.message);
}
