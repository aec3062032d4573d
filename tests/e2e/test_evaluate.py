"""The evaluation of the skills asks what it says, on held-out seeds, and compares exactly."""

from deepspan.evaluate import Score, evaluate
from deepspan.llm import LLM
from deepspan.skills.suite import EVAL_SEED, sample


class _Knowing:
    """Stands for a model: answers every question rightly, or all with the same word."""

    def __init__(self, answers: dict[str, str], word: str | None = None) -> None:
        self.answers, self.word = answers, word

    def chat_many(self, conversations, params):
        questions = [conversation[0]["content"][-1]["text"] for conversation in conversations]
        return [_Answer(self.word or self.answers[question]) for question in questions]


class _Answer:
    def __init__(self, text: str) -> None:
        self.text = text


def test_evaluate_of_right_and_wrong_answers_counts_both():
    answers = {turn.question: turn.answer for i in range(20) for turn in sample(EVAL_SEED, i, "recall").turns[:1]}
    perfect = evaluate(_Knowing(answers), 20, skills=("recall",))
    assert perfect == [Score(skill="recall", num_right=20, num_asked=20, failures=())]
    [wrong] = evaluate(_Knowing(answers, word="nothing"), 20, skills=("recall",))
    assert (wrong.num_right, wrong.num_asked, len(wrong.failures)) == (0, 20, 5)
    assert wrong.failures[0][2] == "nothing"


def test_evaluate_of_random_model_runs_pictures_and_reports_progress(llm: LLM):
    seen: list[tuple[int, int]] = []
    scores = evaluate(llm, 2, skills=("colour", "which", "adding"), progress=lambda *at: seen.append(at))
    assert [(score.skill, score.num_asked) for score in scores] == [("colour", 2), ("which", 2), ("adding", 2)]
    assert seen[-1] == (6, 6)


def test_evaluate_of_long_skill_asks_fewer_questions():
    answers = {turn.question: turn.answer for turn in sample(EVAL_SEED, 0, "recall_8k").turns[:1]}
    [score] = evaluate(_Knowing(answers), 20, skills=("recall_8k",))
    assert score.num_asked == 1
