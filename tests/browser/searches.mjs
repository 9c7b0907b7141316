// ComfyUI's own searches (templates, nodes, models, saved workflows), menus and dialogs, its console and its start, with the pack and
// without it: what core shows is the same, and only ours is added. COMFYUI_BARE is a server without the pack, with the
// same frontend and the same models.
import assert from "node:assert/strict";
import { openPage } from "./comfy.mjs";

const only = process.argv.slice(2).filter((word) => !word.startsWith("--")); // of these; all where none is named
const WORDS = {
  templates: ["wan 2.2", "hunyuan", "ltx", "image to video", "framepack", "anygpu"], // core's index has no word of ours alone
  nodes: ["sampler", "load", "upscale", "vae decode", "anygpu"],
  models: ["wan", "vae"],
  workflows: ["wan", "portrait"], // of those that drive.py saves
};
const OURS = { templates: /^anygpu_/, nodes: /^AnyGPU |^Any model to video$/, models: /^$/, workflows: /^$/ };
const MOST = 64; // results that the node search shows

/** What `read` gives once it gives the same for two seconds. */
async function settled(page, read) {
  for (let last = await read(), same = 0; ; ) {
    await page.waitForTimeout(500);
    const now = await read();
    same = JSON.stringify(now) === JSON.stringify(last) ? same + 1 : 0;
    if (same === 4) return now;
    last = now;
  }
}

/** The names of the cards that a text leaves in All Templates, and how many the dialog counts. */
async function templates(page, text) {
  const dialog = page.getByRole("dialog").last();
  await dialog.getByPlaceholder(/search/i).first().fill(text);
  const [, count, total] = (await settled(page, async () => /Showing (\d+) of (\d+)/.exec(await dialog.innerText()))).map(Number);
  const cards = page.locator('[data-testid^="template-workflow-"]:not([data-testid="template-workflows-content"])');
  for (let left = 40, shown = await cards.count(); left && shown < count; left--, shown = await cards.count()) {
    await cards.last().evaluate((card) => card.scrollIntoView()); // and more are drawn
    for (let rest = 20; rest && (await cards.count()) === shown; rest--) await page.waitForTimeout(50);
  }
  const names = await cards.evaluateAll((all) => all.map((card) => card.dataset.testid.replace("template-workflow-", "")));
  assert.equal(names.length, count, `${text}: cards of ${count} that are counted`);
  return { names, total };
}

async function templateResults(page) {
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
  await page.getByText("All Templates", { exact: true }).first().click({ timeout: 60000 });
  const found = {};
  for (const text of WORDS.templates) {
    const { names, total } = await templates(page, text);
    assert.ok(names.length < total, `"${text}" leaves ${names.length} of ${total} templates`);
    Object.assign(found, { [text]: names, total });
  }
  const dialog = page.getByRole("dialog").last();
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" }); // or the next double click would meet it
  return found;
}

async function nodeResults(page) {
  const found = {};
  for (const text of WORDS.nodes) {
    const items = page.getByTestId("result-item");
    for (let left = 3; left; left--) {
      await page.mouse.dblclick(900, 450); // on a busy machine the two clicks may come too far apart
      const offered = items.first().waitFor({ timeout: left > 1 ? 15000 : 60000 }); // before a letter is typed
      if (await offered.then(() => true, (error) => { if (left === 1) throw error; })) break;
    }
    await page.keyboard.type(text, { delay: 20 });
    const read = () => items.evaluateAll((all) => all.map((item) => (item.querySelector(".truncate") ?? item).textContent.trim()));
    found[text] = await settled(page, read);
    await page.keyboard.press("Escape");
    await items.first().waitFor({ state: "detached" });
  }
  return found;
}

/** What the side bar's tab of that name finds for each word of a search. */
async function sideBarResults(page, tab, search) {
  await page.evaluate((name) => window.app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${name}`), tab);
  const found = {};
  for (const text of WORDS[search]) {
    await page.locator(".comfy-vue-side-bar-container, .sidebar-content-container").getByPlaceholder(/search/i).first().fill(text);
    found[text] = await settled(page, () => page.locator('[role="treeitem"]').allInnerTexts());
    assert.ok(found[text].some((name) => name.includes(text)), `${tab}: nothing with "${text}" in its name`);
  }
  return found;
}

/** What core's menus and dialogs list, by their names: as the frontend reads it, and as the settings show it. */
async function listed(page) {
  const found = await page.evaluate(() => {
    const { app, LiteGraph } = window;
    const { command, setting, getSidebarTabs } = app.extensionManager;
    const names = (all) => all.map((each) => each?.content ?? each?.id ?? each).filter(Boolean).map(String);
    const shown = Object.values(LiteGraph.registered_node_types).filter((type) => !type.skip_list);
    return {
      "node menu": shown.map((type) => `${type.category}: ${type.title}`).sort(),
      "canvas menu": names(app.canvas.getCanvasMenuOptions()),
      "commands": names(command.commands).sort(), // core's extensions register them as they load, in any order
      "settings": names(Object.values(setting.settings ?? app.ui.settings.settingsLookup)),
      "side bar": names(getSidebarTabs()),
    };
  });
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.ShowSettingsDialog"));
  const dialog = page.getByRole("dialog").last();
  await dialog.waitFor();
  found["settings dialog"] = (await settled(page, () => dialog.innerText())).split("\n").map((line) => line.trim()).filter(Boolean);
  await page.keyboard.press("Escape");
  await dialog.waitFor({ state: "detached" });
  return found;
}

const SEARCHES = { templates: templateResults, nodes: nodeResults, models: (page) => sideBarResults(page, "model-library", "models"), workflows: (page) => sideBarResults(page, "workflows", "workflows") };
const OUR_NAMES = /anygpu|any model to video/i;
const ADDED_SECONDS = 3; // at most, between the page's first byte and its nodes

/** What the page of a server shows, says and loads. */
async function results({ browser, page, errors, heard, ready }) {
  const found = { console: [...heard], start: ready };
  try {
    if (!only.length || only.includes("menus")) found.listed = await listed(page);
    for (const [search, find] of Object.entries(SEARCHES)) if (!only.length || only.includes(search)) found[search] = await find(page);
    assert.deepEqual(errors, [], "the page reported errors");
    assert.deepEqual(heard.filter((line) => /MiniSearch|reading 'search'/.test(line)), []);
    return found;
  } finally {
    await browser.close();
  }
}

const started = Date.now();
const pages = [await openPage({ url: process.env.COMFYUI_BARE, pack: false }), await openPage({})]; // one after the other: each start is timed
const [bare, packed] = await Promise.all(pages.map(results)); // what takes the time is waiting for what does not change any more
console.log(`--  searched without the pack and with it (${((Date.now() - started) / 1000).toFixed(1)} s)`);

for (const [what, lines] of Object.entries(packed.listed ?? {})) {
  const core = lines.filter((line) => !OUR_NAMES.test(line));
  assert.ok(core.length, `${what}: nothing of core's`);
  assert.deepEqual(core, bare.listed[what], `${what}: core's entries changed`);
  console.log(`ok  ${what}: ${core.length} of core, the same as without the pack; ${lines.length - core.length} of ours`);
}
const added = packed.console.filter((line) => !bare.console.includes(line) && !OUR_NAMES.test(line));
assert.deepEqual(added, [], "the console says more than without the pack");
const seconds = (packed.start - bare.start) / 1000;
console.log(`ok  console: nothing is added to ${bare.console.length} warnings and errors; start: ${seconds.toFixed(1)} s longer`);

for (const search of Object.keys(packed).filter((name) => name in SEARCHES)) {
  for (const text of WORDS[search]) {
    const ours = packed[search][text].filter((name) => OURS[search].test(name));
    const core = packed[search][text].filter((name) => !OURS[search].test(name));
    const full = search === "nodes" && packed[search][text].length === MOST; // ours push the last ones out
    const expected = full ? bare[search][text].slice(0, core.length) : bare[search][text];
    if (search === "templates") assert.deepEqual(core.toSorted(), expected.toSorted(), `${search}, "${text}"`);
    else assert.deepEqual(core, expected, `${search}, "${text}"`); // its order depends on what else is in the index
    assert.ok(bare[search][text].every((name) => !OURS[search].test(name)), "ours without the pack");
    if (text === "anygpu" || text === "framepack") assert.ok(ours.length > 0, `${search}, "${text}": none of ours`);
    console.log(`ok  ${search}, "${text}": ${core.length} of core, the same as without the pack; ${ours.length} of ours`);
  }
}
if (packed.templates) {
  const { anygpu, total } = packed.templates;
  assert.equal(total - anygpu.length, bare.templates.total, "not all of core's templates are counted");
  console.log(`ok  templates: ${bare.templates.total} of core, as many as without the pack; ${anygpu.length} of ours`);
}
assert.ok(seconds < ADDED_SECONDS, `the page took ${seconds.toFixed(1)} s longer to start`);
