"""Tool calls in the text that models write: one file per dialect, chosen by `toque.text.tools.choose`."""
