from __future__ import annotations
def remember(module, traced):
    module.__dict__["_last"] = traced
def ir(module, level):
    return "\n\n".join(s.text for s in module.__dict__["_last"].stages)
