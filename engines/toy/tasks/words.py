"""The words that the tasks share; each of them is one token of the toy tokenizer when a space comes before it."""

ADJECTIVES = (
    "amber", "ancient", "bold", "bright", "broken", "calm", "careful", "clever", "cold", "copper", "curious", "dark",
    "early", "empty", "fair", "famous", "fast", "friendly", "gentle", "golden", "happy", "heavy", "hidden", "honest",
    "hungry", "icy", "kind", "large", "lazy", "light", "little", "lonely", "lucky", "modern", "narrow", "noisy", "old",
    "pale", "patient", "plain", "polite", "proud", "quiet", "rapid", "secret", "silent", "silver", "simple", "sleepy",
    "small", "smooth", "soft", "strange", "strong", "sunny", "tall", "tiny", "warm", "wide", "wild", "wise", "wooden",
    "young", "dusty",
)  # fmt: skip
ANIMALS = (
    "badger", "bear", "beaver", "camel", "cat", "crow", "deer", "dog", "dolphin", "duck", "eagle", "falcon", "fox",
    "frog", "goat", "goose", "hare", "heron", "horse", "lion", "mouse", "otter", "owl", "panda", "rabbit", "raven",
    "seal", "shark", "sparrow", "tiger", "whale", "wolf",
)  # fmt: skip
THINGS = (
    "anchor", "basket", "bell", "bridge", "candle", "castle", "clock", "coin", "door", "drum", "forest", "garden",
    "hammer", "island", "key", "lamp", "letter", "market", "mirror", "mountain", "river", "road", "ship", "spoon",
    "stone", "table", "tower", "tree", "valley", "village", "wagon", "window",
)  # fmt: skip
NOUNS = ANIMALS + THINGS
NAMES = (
    "Ada", "Alice", "Anna", "Ben", "Carl", "Clara", "Daniel", "David", "Ella", "Emma", "Eva", "Felix", "Frank",
    "George", "Grace", "Hugo", "Ida", "Jack", "James", "Jane", "Julia", "Karl", "Laura", "Leo", "Lily", "Lucy", "Marie",
    "Mark", "Martin", "Mary", "Max", "Mia", "Nina", "Noah", "Olga", "Oscar", "Paul", "Peter", "Rosa", "Sam", "Sara",
    "Simon", "Sofia", "Theo", "Thomas", "Tom", "Victor", "Vera",
)  # fmt: skip
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "brown")
CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing",
    "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "England": "London",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "Delhi", "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo",
    "Kenya": "Nairobi", "Mexico": "Mexico City", "Morocco": "Rabat", "Nepal": "Kathmandu", "Norway": "Oslo",
    "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon", "Romania": "Bucharest", "Russia": "Moscow",
    "Scotland": "Edinburgh", "Spain": "Madrid", "Sweden": "Stockholm", "Switzerland": "Bern", "Thailand": "Bangkok",
    "Turkey": "Ankara",
}  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Bern", "Brussels", "Budapest", "Cairo", "Dublin", "Helsinki", "Lima", "Lisbon", "London",
    "Madrid", "Moscow", "Oslo", "Paris", "Rome", "Stockholm", "Tokyo", "Vienna", "Warsaw",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def article(word: str) -> str:
    """The word with its indefinite article."""
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def joined(words: list[str] | tuple[str, ...]) -> str:
    """Words as a list in a sentence: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
