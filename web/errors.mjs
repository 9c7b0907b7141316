// The notice for one error.
import { ask } from "./ask.mjs";
import { button, copyButton, make, style, terms } from "./elements.mjs";
import { jumpTo, nodeOf, run, titleOf } from "./jump.mjs";
import { inAppMode, isOpen, textsHere, workflowOf } from "./runs.js";

const HELP = "https://github.com/anygpu/anygpu/blob/main/docs/troubleshooting.md";

/** Close ComfyUI's own notice of the same failure; its details stay in the side panel. */
function closeOther(tries = 20) {
  const button = document.querySelector('[data-testid="error-overlay-dismiss"]');
  if (button) button.click();
  else if (tries) setTimeout(() => closeOther(tries - 1), 100);
}

function notice(role, title, dismiss, ...content) {
  style();
  const close = make("button", { type: "button", class: "anygpu-close", "aria-label": "Close", onclick: dismiss }, "×");
  return make("section", { class: "anygpu-toast anygpu", role, "aria-label": title }, make("header", {}, make("strong", {}, title), close), content);
}

/** In App mode, which shows no text under a node, what a demo model drew otherwise, also in cached nodes. */
export function demoNotice(prompt, dismiss) {
  const nodes = inAppMode() && isOpen(prompt) ? [...textsHere()].filter(([id]) => nodeOf(id).length) : [];
  const texts = nodes.flatMap(([, [, demo]]) => demo);
  return texts.length && notice("status", "Drawn by a demo model", dismiss, texts.map((text) => make("p", {}, text)));
}

/** The notice for the error of a run; `dismiss` removes it. The node is one of the open graph, or is only named. */
export async function noticeOf({ exception_message: message = "", exception_type: type = "", node_id: id, node_type: kind, prompt_id: prompt }, dismiss) {
  const { found, expected, fix, press, ...it } = await ask("/error", { message }).catch(() => ({ found: message.trim() }));
  const node = isOpen(prompt) ? nodeOf(id).at(-1) : null;
  const here = node && [node.comfyClass, node.type].includes(kind);
  const title = here ? titleOf(id) : window.LiteGraph.registered_node_types[kind]?.title ?? kind;
  const memory = type.endsWith("OutOfMemoryError");
  const rows = [["In", !isOpen(prompt) && workflowOf(prompt).filename], ["Found", found], ["Expected", expected], [memory ? "Lower" : "Do", fix]];
  const jump = here && button(`Go to ${title}`, () => jumpTo(id) || (jump.textContent = "This node no longer exists"), { class: "anygpu-button anygpu-main" });
  closeOther();
  return notice(
    "alert",
    `${memory ? "Out of memory" : "Stopped"}: ${title}`,
    dismiss,
    terms(rows.filter(([, text]) => text)),
    make("footer", {}, press && isOpen(prompt) && button(press, () => run(it)), jump, copyButton(message.trim()), make("a", { href: HELP, target: "_blank", rel: "noopener" }, "Troubleshooting")),
  );
}
