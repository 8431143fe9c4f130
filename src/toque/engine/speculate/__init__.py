"""Speculative decoding: guess a few tokens ahead, verify them all in one step, keep those that plain decoding chooses.

A step computes a sequence's newest token and the guessed ones as neighbouring rows. Each row is sampled in the state
that plain decoding would have there, and the first that disagrees with the guess ends the run: its own choice stands,
what was computed after it is forgotten. So the answer is that of plain decoding, bit for bit, and a step yields one
token or more.

::

    settings.py    what --speculate says
    proposer.py    what guesses: the contract
    ngram.py       ... by what followed the same tokens earlier in the text
    draft.py       ... by asking a smaller model of the same vocabulary
    pace.py        how far to guess: gains against measured costs
    speculator.py  one step's guesses, within what the scheduler has room for
"""
