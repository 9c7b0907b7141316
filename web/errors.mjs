// The notice for one error.
import { ask } from "./ask.mjs";
import { copyButton, make, style } from "./elements.mjs";
import { jumpTo, titleOf } from "./jump.mjs";

const HELP = "https://github.com/anygpu/anygpu/blob/main/docs/troubleshooting.md";
const MEMORY = /OutOfMemoryError$/;

/** Remove the notice. */
export function dismiss() {
  document.querySelector(".anygpu-toast")?.remove();
}

/** Close ComfyUI's own notice of the same failure, which comes about now; its details stay in the side panel. */
function closeOther(tries = 20) {
  const button = document.querySelector('[data-testid="error-overlay-dismiss"]');
  if (button) button.click();
  else if (tries) setTimeout(() => closeOther(tries - 1), 100);
}

/** Show the error of a run. Only the newest notice is shown. */
export async function show({ exception_message: message = "", exception_type: type, node_id: node, node_type: kind }) {
  style();
  const { found, expected, fix } = await ask("/error", { message }).catch(() => ({ found: message.trim() }));
  dismiss();
  const title = titleOf(node, kind);
  const row = (name, text) => text && [make("dt", {}, name), make("dd", {}, text)];
  const close = make("button", { type: "button", class: "anygpu-close", "aria-label": "Close", onclick: dismiss }, "×");
  const jump = make("button", { type: "button", class: "anygpu-button anygpu-main" }, `Go to ${title}`);
  jump.addEventListener("click", () => {
    if (!jumpTo(node)) jump.textContent = "This node no longer exists";
  });
  const heading = MEMORY.test(type) ? "Out of memory" : "Stopped";
  const notice = make(
    "section",
    { class: "anygpu-toast anygpu", role: "alert", "aria-label": `Error in ${title}` },
    make("header", {}, make("strong", {}, `${heading}: ${title}`), close),
    make("dl", {}, row("Found", found), row("Expected", expected), row(MEMORY.test(type) ? "Lower" : "Do", fix)),
    make("footer", {}, jump, copyButton(message.trim()), make("a", { href: HELP, target: "_blank", rel: "noopener" }, "Troubleshooting")),
  );
  notice.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    dismiss();
  });
  document.body.append(notice);
  closeOther();
}
