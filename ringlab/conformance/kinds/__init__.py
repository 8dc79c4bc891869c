"""The other kinds of checked functions: a merge of partials, a decode, a training step, linear attention."""
