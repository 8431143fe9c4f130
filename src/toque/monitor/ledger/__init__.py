"""The ledger: one row per client request, exact to the token, whatever becomes of the process or the database.

::

    Ledger.open ─▶ Entry ─▶ Entry.close          the event loop: a few microseconds each, no system call
                     │
                     ▼ UsageRecord, length + crc
                  Journal ── mapped file ──▶ fdatasync (journal thread)
                     │
                     ▼ in batches
                  Applier ── one transaction ──▶ usage_event, usage_attempt, and the sums
                              usage_hour, usage_key_hour, usage_day
"""
