// The notice for one error.
import { ask } from "./ask.mjs";
import { button, copyButton, make, style } from "./elements.mjs";
import { jumpTo, nodeOf, run, titleOf } from "./jump.mjs";
import { isOpen, workflowOf } from "./runs.js";

const HELP = "https://github.com/anygpu/anygpu/blob/main/docs/troubleshooting.md";
const MEMORY = /OutOfMemoryError$/;

/** Close ComfyUI's own notice of the same failure, which comes about now; its details stay in the side panel. */
function closeOther(tries = 20) {
  const button = document.querySelector('[data-testid="error-overlay-dismiss"]');
  if (button) button.click();
  else if (tries) setTimeout(() => closeOther(tries - 1), 100);
}

/** The notice for the error of a run; `dismiss` removes it. The node is one of the open graph, or is only named. */
export async function noticeOf({ exception_message: message = "", exception_type: type, node_id: id, node_type: kind, prompt_id: prompt }, dismiss) {
  style();
  const { found, expected, fix, press, ...it } = await ask("/error", { message }).catch(() => ({ found: message.trim() }));
  const node = isOpen(prompt) ? nodeOf(id).at(-1) : null;
  const here = node && [node.comfyClass, node.type].includes(kind);
  const title = here ? titleOf(id) : window.LiteGraph.registered_node_types[kind]?.title ?? kind;
  const row = (name, text) => text && [make("dt", {}, name), make("dd", {}, text)];
  const close = make("button", { type: "button", class: "anygpu-close", "aria-label": "Close", onclick: dismiss }, "×");
  const jump = here && button(`Go to ${title}`, () => jumpTo(id) || (jump.textContent = "This node no longer exists"), { class: "anygpu-button anygpu-main" });
  const heading = MEMORY.test(type) ? "Out of memory" : "Stopped";
  closeOther();
  return make(
    "section",
    { class: "anygpu-toast anygpu", role: "alert", "aria-label": `Error in ${title}` },
    make("header", {}, make("strong", {}, `${heading}: ${title}`), close),
    make(
      "dl",
      {},
      row("In", !isOpen(prompt) && workflowOf(prompt).filename),
      row("Found", found),
      row("Expected", expected),
      row(MEMORY.test(type) ? "Lower" : "Do", fix),
    ),
    make("footer", {}, press && button(press, () => run(it)), jump, copyButton(message.trim()), make("a", { href: HELP, target: "_blank", rel: "noopener" }, "Troubleshooting")),
  );
}
