"""Other kinds of functions than a ring: a merge of partials, a decode, a training step, and linear attention."""
