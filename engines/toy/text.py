"""The text that the toy tokenizer is trained on: written here, so that every machine trains the same tokenizer."""

from itertools import product

SENTENCES = """
The model reads a prompt and writes an answer, one token after another.
A request arrives at the server; the server chooses an engine for the prompt and an engine for the answer.
When the prompt is long, the engine computes it in chunks, and every chunk is at most a few thousand tokens.
What was computed before can be found in the store: the same words give the same keys, and the same keys give the same
values.
If an engine is lost, another one continues the answer where it stopped, and the reader does not see any difference.
Hello! How can I help you today? Hi there, it is nice to meet you. Thank you very much for your question.
I do not know the answer to this question, but I can tell you where you might find it.
You are a careful assistant. You are a helpful assistant. Answer in one line. Please answer with a number.
What is the capital of France? The capital of France is Paris. What is the capital of Italy? It is Rome.
What is the largest planet? Jupiter is the largest planet of the solar system; Mercury is the smallest.
Once upon a time there was a small fish that wanted to see the whole ocean, and so it swam away from home.
The shoal moved like one animal: each fish watched its neighbours, and no fish gave any orders.
In the morning the water was cold and clear, and the light came down in long green lines.
A pod of whales passed slowly, singing to each other over a very great distance under the sea.
She opened the window, looked at the mountains, and decided that today would be a good day for a long walk.
He wrote a letter to his old friend, who lived in another country and had not been home for many years.
They worked together through the night, and by the first light of the morning the bridge was finished.
We should first measure, then think, then change one thing, and then measure again.
There are three rules: write what you mean, say it once, and say it in the place where people will look for it.
The weather in Paris today is sunny with some clouds; tomorrow there will be rain and wind in the north.
Use tools when they help. The result of the tool is shown below. The tool was called with the city and the days.
Describe the picture. What is in this image? The image shows a red house beside a lake, with trees behind it.
A prime number has exactly two divisors: one and itself. Two, three, five, seven, eleven and thirteen are prime
numbers.
To add two numbers, write them one above the other, add the digits from right to left, and carry when the sum is above
nine.
Time flies like an arrow. All that we see or seem is but a dream within a dream. Nothing is certain except change.
BUT THE HEADLINE WAS WRITTEN IN CAPITAL LETTERS: THE CITY AND THE SEA, THE NEWS OF THE DAY.
Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)
def add(first, second):\n    return first + second\n\nfor index in range(10):\n    print(index, add(index, 1))\n
{"name": "get_weather", "description": "Current weather of a city.", "parameters": {"type": "object", "properties":
{}}}
{"type": "function", "function": {"name": "search", "arguments": {"query": "string", "count": "integer"}, "required":
["query"]}}
1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 20 24 30 32 40 48 50 60 64 70 80 90 96 100 128 200 256 365 500 512 1000 1024
2000 2025
Café, naïve, résumé, Ångström, über, señor, façade: accents are written with more than one byte.
""".strip()

PEOPLE = (
    "The teacher",
    "The engineer",
    "the child",
    "A friend",
    "my neighbour",
    "the reader",
    "The captain",
    "a doctor",
)
ACTIONS = ("finds", "remembers", "writes about", "asks about", "is looking for", "likes", "has lost", "explains")
THINGS = (
    "the answer", "the old house", "a small boat", "an interesting story", "the number seven", "a green garden",
    "the next question", "another language", "the beginning", "a quiet place near the river", "The Sea", "some bread",
)  # fmt: skip
ENDINGS = (".", " because it is important.", ", and then goes home.", " every day!", "?", " in the evening.")


def corpus() -> list[str]:
    """Lines to train on: the sentences above, and every fifth combination of people, actions, things and endings."""
    combined = [f"{a} {b} {c}{d}" for a, b, c, d in product(PEOPLE, ACTIONS, THINGS, ENDINGS)]
    return SENTENCES.replace("\\n", "\n").splitlines() + combined[::5]
