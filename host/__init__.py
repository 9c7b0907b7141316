"""Everything that touches ComfyUI: the only room that imports it."""
