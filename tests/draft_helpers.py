"""Guesses that are mostly right: a drafter that was told what the same server says without drafts.

Random draft stages guess wrong, so runs of accepted tokens come from here.
"""

from deepspan.runtime.choosing import Drafts


class Told:
    """The tokens of every prompt that `watch`ed engines have answered, and a drafter that guesses them.

    wrong_at: every so many tokens, a guess is wrong; 0 for never. Prompts nobody has answered get no guesses.
    """

    def __init__(self, wrong_at=4):
        self.answers, self.wrong_at, self.other = {}, wrong_at, None

    def watch(self, llm):
        """Remember what an engine answers."""
        begin = llm._runner._begin

        def remembering(chunk, failed):
            begin(chunk, failed)
            row = llm._runner._rows[chunk.row]
            self.answers[row.request.token_ids.tobytes()] = row

        llm._runner._begin = remembering

    def guess_for(self, llm):
        """Guess in the place of an engine's draft stages; their context is kept all the same."""
        llm._runner._drafting.propose = lambda anchors: [self._guesses(anchor) for anchor in anchors]

    def _guesses(self, anchor):
        row, tokens = anchor.row, []
        known = self.answers.get(row.request.token_ids.tobytes())
        if known is None:
            return Drafts()
        first = len(row.generated)
        for number, token in enumerate(known.generated[first : first + anchor.count], start=first):
            wrong = self.wrong_at and number % self.wrong_at == self.wrong_at - 1
            tokens.append((self.other or token ^ 1) if wrong else token)
            if row.ends_at(tokens[-1]):
                break
        return Drafts(tokens=tuple(tokens), log_q=(None,) * len(tokens))
