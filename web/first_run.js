// Under the load node: which model fits, while none is installed; a button that downloads the chosen one.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const NODE = "AnyGPULoadPipeline";
const WIDGET = "anygpu_first_steps"; // not the name of an input: shown only, never saved or sent

/** Queue the download of an offer; when it has ended well, the lists are read again. */
async function download(node, title) {
  const output = { [node.id]: { class_type: "AnyGPUDownloadModel", inputs: { model: title, download: "download" } } };
  const { prompt_id } = await api.queuePrompt(0, { output, workflow: app.graph.serialize() });
  api.addEventListener("execution_success", async function ended({ detail }) {
    if (detail.prompt_id !== prompt_id) return;
    api.removeEventListener("execution_success", ended);
    await app.refreshComboInNodes();
    node.anygpuOffer();
  });
}

async function offer(node) {
  const { anygpu_first_run: text, anygpu_offers: offers = {} } = node.constructor.nodeData?.input?.required?.model?.[1] ?? {};
  const model = node.widgets?.find(({ name }) => name === "model");
  const chosen = () => offers[model.value] ?? (text && Object.values(offers)[0]); // smallest first
  if (!model || node.anygpuOffer || !chosen()) return node.anygpuOffer?.();
  const { button: made, copyButton, make, style } = await import("./elements.mjs");
  if (node.anygpuOffer) return; // loaded meanwhile
  style();
  const button = made("");
  node.anygpuOffer = () => {
    button.hidden = !chosen() || (offers[model.value] && model.options.values?.includes?.(model.value));
    button.textContent = `Download ${chosen()?.title}…`;
  };
  button.addEventListener("click", async () => {
    const { title, text: message } = chosen();
    if (!(await app.extensionManager.dialog.confirm({ title: `Download ${title}`, message }))) return;
    await download(node, title).catch(({ message: detail }) => app.extensionManager.toast.add({ severity: "error", summary: `Download ${title}`, detail }));
  });
  const changed = node.onWidgetChanged;
  node.onWidgetChanged = function (...given) {
    changed?.apply(this, given);
    node.anygpuOffer();
  };
  node.anygpuOffer();
  const shown = text && make("p", {}, text.split("\n", 2).join("\n")); // all of it would be cut off: the tab has room
  const buttons = make("div", {}, button, text && copyButton(text, "Copy what to download"));
  const element = make("div", { class: text ? "anygpu anygpu-first" : "anygpu" }, shown, buttons);
  const height = text ? 210 : 30; // eight lines and two buttons
  node.addDOMWidget(WIDGET, "anygpu_text", element, { serialize: false, hideOnZoom: false, getMinHeight: () => height });
  node.setSize?.([Math.max(node.size[0], 325), Math.max(node.size[1], node.computeSize()[1])]); // a workflow may give it more
}

const isOurs = (node) => (node.comfyClass ?? node.type) === NODE;

app.registerExtension({
  name: "anygpu.first_run",
  nodeCreated: (node) => isOurs(node) && offer(node),
  loadedGraphNode: (node) => isOurs(node) && offer(node),
  refreshComboInNodes({ [NODE]: { input } }) {
    for (const { _nodes } of [app.graph, ...(app.graph.subgraphs?.values() ?? [])]) _nodes.forEach((node) => node.anygpuOffer?.());
    for (const each of document.querySelectorAll(".anygpu-first :is(p, button + button)")) each.hidden = !input.required.model[1].anygpu_first_run;
  },
});
