"""Text -> tokens -> blocks -> steps. Import from the modules themselves: this package loads nothing, so that `packing`
and `order` stay usable with numpy alone.

sources    what `--dataset` names          spans      documents of one stretch of a file
tokenizer  bytes, trained here, or any     tokenise   spans -> Arrow files of tokens, in parallel
documents  the cache; memory-mapped tokens packing    lengths -> blocks, as a view
order      the order of blocks, computed   steps      blocks -> optimizer steps of this rank
collator   blocks -> tensors
"""
