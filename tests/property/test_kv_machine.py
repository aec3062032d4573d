"""The cache manager under any sequence of calls: nothing is leaked or held twice, hits are what was computed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduling import BLOCK, image, request, small_cache

from deepspan.kv.keys import KeyChain

PROMPTS = [
    request([1] * 70),
    request([1] * 40, [2] * 30),
    request([1] * 20, image("cat", 10), [2] * 20),
    request([1] * 20, image("dog", 10), [2] * 20),
    request([3] * 5, image("cat", 18), image("dog", 4), [4] * 9),
]


class CacheMachine(RuleBasedStateMachine):
    """Sequences are opened, computed in pieces, taken back, preempted and closed in any order."""

    def __init__(self):
        super().__init__()
        self.cache = small_cache(num_blocks=14)
        self.prompts, self.computed, self.running = {}, {}, set()
        self.known = set()  # (prompt, tokens) of all that was ever committed
        self.next_id = 0

    @rule(prompt=st.integers(0, len(PROMPTS) - 1))
    def open(self, prompt):
        wanted = PROMPTS[prompt]
        tokens = wanted.token_ids.tolist()
        chain = KeyChain(tokens, wanted.spans, wanted.images, BLOCK)
        self.cache.open(self.next_id, tokens, wanted.spans, chain)
        self.prompts[self.next_id] = prompt
        self.next_id += 1

    @precondition(lambda self: set(self.prompts) - self.running)
    @rule(data=st.data(), length=st.integers(1, 60))
    def admit(self, data, length):
        one = data.draw(st.sampled_from(sorted(set(self.prompts) - self.running)))
        wanted = PROMPTS[self.prompts[one]]
        prefix = self.cache.find_prefix(one)
        assert prefix % BLOCK == 0
        assert prefix < len(wanted.token_ids)
        assert not any(span.offset < prefix <= span.last for span in wanted.spans)
        assert prefix == 0 or any(self._same(prompt, wanted, prefix) and prefix <= n for prompt, n in self.known)
        end = min(len(wanted.token_ids), prefix + length)
        free = {name: pool.num_free for name, pool in self.cache.pools.items()}
        if self.cache.admit(one, prefix, end, end) is None:
            assert free == {name: pool.num_free for name, pool in self.cache.pools.items()}
        else:
            self.running.add(one)
            self.computed[one] = prefix, end

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(1, 40))
    def extend(self, data, length):
        one = data.draw(st.sampled_from(sorted(self.running)))
        committed, reserved = self.computed[one]
        end = min(len(PROMPTS[self.prompts[one]].token_ids), reserved + length)
        if self.cache.extend(one, end) is not None:
            self.computed[one] = committed, end

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data):
        one = data.draw(st.sampled_from(sorted(self.running)))
        committed, reserved = self.computed[one]
        end = data.draw(st.integers(committed, reserved))
        self.cache.commit(one, end)
        self.computed[one] = end, reserved
        self.known.add((self.prompts[one], end))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rollback(self, data):
        one = data.draw(st.sampled_from(sorted(self.running)))
        self.cache.rollback(one)
        committed, _ = self.computed[one]
        self.computed[one] = committed, committed

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        one = data.draw(st.sampled_from(sorted(self.running)))
        self.cache.release(one)
        self.running.remove(one)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def close(self, data):
        one = data.draw(st.sampled_from(sorted(self.prompts)))
        self.cache.close(one)
        self.running.discard(one)
        del self.prompts[one]

    @rule()
    def forget(self):
        self.cache.forget_prefixes()
        self.known.clear()
        # What runs on is published anew only from where it stands.
        self.known |= {(self.prompts[one], self.computed[one][0]) for one in self.running}

    @invariant()
    def nothing_is_leaked(self):
        self.cache.check()

    def _same(self, prompt, wanted, length):
        """Whether the first `length` tokens of two prompts are the same, their images included."""
        other = PROMPTS[prompt]
        ids_agree = other.token_ids[:length].tolist() == wanted.token_ids[:length].tolist()
        images = [
            [image.digest for span, image in zip(one.spans, one.images, strict=True) if span.offset < length]
            for one in (other, wanted)
        ]
        return ids_agree and images[0] == images[1]

    def teardown(self):
        for one in list(self.prompts):
            self.cache.close(one)
        self.cache.check()
        assert all(pool.num_free == pool.num_blocks for pool in self.cache.pools.values())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
