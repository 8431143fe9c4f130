"""The engine of one model: requests in, tokens out, a step at a time.

::

    Engine.add ─▶ admission ─▶ FairQueue ─▶ Scheduler.plan ─▶ StepPlan ─▶ Runner ─▶ Executable.step
                  (refuse)     (whose turn)  │ StepBudget (tokens)  │      (arrays)       │
                                             │ KVCache (blocks)     ▼                     ▼
    SequenceOutput ◀──────────────────────────────── Engine._apply ◀────────────── StepResult

`loader.load_engine` makes one from a model file; `llm.LLM` is the same engine as a library; `fake.FakeExecutable`
stands in for a model in tests.
"""
