// Titles, descriptions, tags and order of our workflows in the template browser: core lists those of a pack by file name
// alone, so they join the list of core's own, which has all that. Without templates.json they stay as core lists them.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const PACK = decodeURIComponent(new URL(".", import.meta.url).pathname.split("/").at(-2)); // the folder it is installed in

/** Our workflows as core describes its own; empty where nobody can be asked. */
async function described(names) {
  try {
    const rows = await (await fetch(new URL("./templates.json", import.meta.url))).json();
    return rows.filter(({ name }) => names.includes(name)).map((row) => ({ ...row, mediaType: "image", mediaSubtype: "jpg" }));
  } catch {
    return [];
  }
}

app.registerExtension({
  name: "anygpu.templates",
  init() {
    const { getWorkflowTemplates, getCoreWorkflowTemplates } = api;
    if (!getWorkflowTemplates || !getCoreWorkflowTemplates) return;
    let ours = [];
    api.getWorkflowTemplates = async () => {
      const packs = await getWorkflowTemplates.call(api);
      ours = await described(packs[PACK] ?? []);
      if (!ours.length) return packs;
      const left = (names) => names.filter((name) => !ours.some((row) => row.name === name));
      return Object.fromEntries(Object.entries(packs).map(([pack, names]) => [pack, left(names)])); // a second copy of ours too
    };
    api.getCoreWorkflowTemplates = async (locale) => {
      const categories = await getCoreWorkflowTemplates.call(api, locale);
      const known = !ours.length || categories.some(({ moduleName }) => moduleName === PACK); // it asks itself where a language is missing
      return known ? categories : [...categories, { moduleName: PACK, title: "AnyGPU", templates: ours }];
    };
  },
});
