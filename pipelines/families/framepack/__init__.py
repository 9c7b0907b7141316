"""FramePack."""
