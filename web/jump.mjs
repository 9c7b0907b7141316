// Finds the node on the canvas for an execution id, through subgraphs.
import { app } from "../../scripts/app.js";
import { inAppMode } from "./runs.js";

const OUTSIDE = -10; // a subgraph's own inputs

/** The nodes on the path to an execution id such as "3:12", the node itself last; none where it is not there. */
export function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  const path = [];
  for (const part of String(id).split(":")) {
    const node = graph?.getNodeById?.(Number(part)) ?? graph?.getNodeById?.(part);
    if (!node) return [];
    path.push(node);
    graph = node.subgraph;
  }
  return path;
}

/** The workflow's graph and its subgraphs. */
export function graphs() {
  const root = app.rootGraph ?? app.graph;
  return [root, ...(root?.subgraphs?.values() ?? [])];
}

/** Set an input; run. */
export function run({ node, input, value }) {
  for (const graph of graphs())
    for (const { widgets } of graph.findNodesByType(node)) widgets.find(w => w.name === input).value = value;
  app.queuePrompt(0);
}

/** Set an input of a node, or of the subgraph that hands it on; what else is linked is shown. */
export function set(id, name, value) {
  const path = nodeOf(id);
  let node = path.pop();
  for (let link; (link = node?.graph.getLink(node.inputs?.find(({ widget }) => widget?.name === name)?.link)); ) {
    if (Number(link.origin_id) !== OUTSIDE) return jumpTo(id);
    node = path.pop();
    name = node?.inputs[link.origin_slot]?.widget?.name;
  }
  const widget = node?.widgets?.find((each) => each.name === name);
  if (!widget) return jumpTo(id);
  node.graph.beforeChange();
  widget.value = value;
  node.onWidgetChanged?.(name, value, null, widget);
  node.graph.afterChange();
  app.canvas.setDirty(true, true);
}

export const titleOf = (id) => nodeOf(id).at(-1)?.title || `node ${id}`;

/** Select the node with an execution id and scroll to it; false if it no longer exists. */
export function jumpTo(id) {
  const path = nodeOf(id);
  const node = path.at(-1);
  if (!node) return false;
  const { canvas } = app;
  if (inAppMode()) app.extensionManager.command.execute("Comfy.ToggleLinear");
  if (!canvas.canvas.width) return setTimeout(() => jumpTo(id), 100); // not shown yet
  const home = node.graph ?? app.rootGraph;
  if (home && canvas.graph !== home) {
    if (path.length > 1 && canvas.openSubgraph) canvas.openSubgraph(home, path.at(-2));
    else canvas.setGraph?.(home);
  }
  canvas.selectNode(node, false);
  canvas.centerOnNode(node);
  canvas.setDirty(true, true);
  return true;
}
