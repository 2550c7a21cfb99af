"""One role of a hand-over in a process of its own, on the small test model: `handing_role.py ROLE URL`; prints JSON."""

from __future__ import annotations

import json
import sys

from kvtide.cli_handing import Handing
from kvtide.integrations.transformers import KvStore
from kvtide.integrations.transformers.turns import Conversation
from test_handing import DOCUMENT, answer, nothing
from test_transformers import options
from test_turns import model


def main(role: str, url: str) -> None:
    loaded = model("llama")
    with KvStore(loaded, options(None, remote=url or None)) as store:
        handing, turns = Handing(role, store, ""), []
        if role != "both":
            handing.begin(Conversation(loaded, DOCUMENT), "why", wait_s=200, on_progress=nothing)
        if role != "prefill":
            turns.append(answer(loaded, store))
        told = handing.report(turns)["handed"] if role != "both" else None
    print(json.dumps({"handed": told, "answer": turns[0].answer if turns else None}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
