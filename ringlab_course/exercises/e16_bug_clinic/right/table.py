"""The charts in a table; a patient without one gets None."""


CHARTS = {
    "ash": {"fault": "blind rows", "check": "blind rows", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]},
    "birch": {"fault": "lost sum", "check": "forward", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "cedar": {"fault": "masks by rank", "check": "masks", "case": {"ranks": 2, "tokens": 2, "layout": "striped"}, "matters": ["layout", "causal"]},
    "elm": {"fault": "one hop too many", "check": "bytes", "case": {"ranks": 2, "tokens": 1}, "matters": []},
    "fir": {"fault": "keys as values", "check": "forward", "case": {"ranks": 2, "tokens": 1, "causal": False}, "matters": ["causal"]},
    "hazel": {"fault": "couriers backwards", "check": "dk", "case": {"ranks": 3, "tokens": 1}, "matters": []},
    "larch": {"fault": "shared memory", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": ["dtype"]},
    "oak": {"fault": "first block", "check": "dq", "case": {"ranks": 2, "tokens": 1}, "matters": []},
}


def chart(patient):
    return CHARTS.get(patient)
