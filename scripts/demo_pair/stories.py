"""Writes small stories, registers and conversations whose facts are asked back later.

A document states facts ("Anna lives in Elmford."), goes on with something else, and later needs
the facts again: as a restatement in prose or as the answer to a question.  Nothing but the document
itself tells the answer, so a model can only do well by reading its context.  Each document also
says which characters are such answers (`Document.recalls`), for weighting the loss and for
measuring recall.

Training and held-out documents never share a combination: about one (subject, value) pair in eight
is reserved, training documents avoid those pairs, and held-out documents use nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Split = Literal["train", "heldout"]


def _words(text: str) -> list[str]:
    return text.split()


WOMEN = _words(
    "Anna Mary Clara Ruth Ellen Nora Rose Alice Edith Flora Grace Helen Ida Jane Kate Lucy "
    "Martha Nell Olive Sarah Vera Wanda Agnes Bella Celia Dora Esther Fanny Hilda Irma Julia "
    "Lena Mabel Paula Rita Stella Tilda Una"
)
MEN = _words(
    "Tom John Peter Paul Adam Simon Mark Luke David Henry George Oscar Felix Hugo Ivan Jack "
    "Karl Leo Martin Noah Otto Philip Ralph Stephen Victor Walter Arthur Ben Conrad Daniel "
    "Edgar Frank Gilbert Harry James Max Ned Robert"
)
TOWNS = _words(
    "Elmford Birchley Ashton Redhill Stonebridge Millbrook Fairhaven Oakdale Westbury Northam "
    "Kingsley Marlow Thornton Hazelwood Longfield Greenwich Brighton Dover Weston Lydford "
    "Holloway Cranbrook Ferndale Whitby Ripley Swanley Burton Clifton Hartwell Seaford "
    "Winslow Arden"
)
JOBS = _words(
    "baker miller tailor teacher doctor farmer sailor painter carpenter weaver gardener "
    "potter printer smith butcher cook clerk hunter fisher shepherd nurse lawyer judge barber "
    "mason singer glazier saddler porter driver banker grocer"
)
ANIMALS = _words(
    "cat dog goat horse donkey parrot rabbit hen duck goose pony sheep cow pig mule raven owl "
    "falcon tortoise ferret hedgehog mouse swan pigeon"
)
FOODS = _words(
    "plums pears apples cherries grapes figs nuts cheese honey bread soup pie cake trout "
    "beans carrots turnips cabbage mushrooms berries olives raisins oysters eggs"
)
OBJECTS = _words(
    "lantern kettle violin ladder hammer mirror letter basket candle ring key clock map book "
    "drum flute needle saddle shovel bucket blanket bottle knife purse chain bell trumpet "
    "compass telescope globe teapot umbrella vase wheel rope axe"
)
PLACES = _words(
    "attic cellar kitchen barn stable garden library workshop chapel tower mill boathouse "
    "cottage pantry parlour shed hall bakery inn school bedroom study laundry greenhouse"
)
CONTAINERS = _words("box chest drawer cupboard trunk sack jar crate cabinet barrel desk wardrobe")
BELONGINGS = _words(
    "coat hat scarf boat cart house door kite bag umbrella cloak wagon tent bicycle"
)
COLOURS = _words("red blue green yellow white black brown grey purple orange pink silver golden")
EVENTS = _words("market concert wedding fair race feast sermon meeting picnic dance auction lesson")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
COUNTS = _words("two three four five six seven eight nine ten eleven twelve twenty thirty forty")
COUNTED = _words(
    "hens chairs books coins plates spoons barrels candles sheep bottles ribbons stamps"
)
LOCKS = _words(
    "gate safe locker vault cabin tower harbour archive storeroom office strongbox workshop"
)
WORDS = sorted(
    {
        *(WOMEN + MEN + TOWNS + JOBS + ANIMALS + FOODS + OBJECTS + PLACES + CONTAINERS),
        *(BELONGINGS + COLOURS + EVENTS + DAYS + COUNTS + COUNTED + LOCKS),
    }
)
"""Every word that facts are made of."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A relation between a subject and a value: how to state it, to ask for it and to answer.

    Templates hold `{s}` (subject), `{S}` (subject at the start of a sentence) and `{v}` (value).
    """

    name: str
    subjects: Sequence[str]
    values: Sequence[str]
    statements: Sequence[str]
    questions: Sequence[str]
    answers: Sequence[str]
    reverse_questions: Sequence[str] = ()
    about_people: bool = False


def _article(words: Sequence[str]) -> list[str]:
    return [("an " if word[0] in "aeiou" else "a ") + word for word in words]


def _the(words: Sequence[str]) -> list[str]:
    return ["the " + word for word in words]


PEOPLE = [*WOMEN, *MEN]

KINDS: tuple[Kind, ...] = (
    Kind(
        "home",
        PEOPLE,
        TOWNS,
        (
            "{S} lives in {v}.",
            "{S} has a house in {v}.",
            "{S} came to live in {v} last year.",
            "{S} rents two rooms in {v}.",
            "The home of {s} is in {v}.",
        ),
        ("Where does {s} live?", "In which town does {s} live?", "Where is the home of {s}?"),
        ("{S} lives in {v}.", "The home of {s} is in {v}."),
        ("Who lives in {v}?", "Whose home is in {v}?"),
        about_people=True,
    ),
    Kind(
        "job",
        PEOPLE,
        _article(JOBS),
        (
            "{S} works as {v}.",
            "{S} is {v} by trade.",
            "{S} became {v} at a young age.",
            "{S} earns a living as {v}.",
            "Everyone knows that {s} is {v}.",
        ),
        ("What is the trade of {s}?", "What does {s} do for a living?", "As what does {s} work?"),
        ("{S} works as {v}.", "{S} is {v} by trade."),
        ("Who works as {v}?", "Who is {v} by trade?"),
        about_people=True,
    ),
    Kind(
        "pet",
        PEOPLE,
        _article(ANIMALS),
        (
            "{S} keeps {v}.",
            "{S} bought {v} at the fair.",
            "{S} has {v} at home.",
            "{S} is never seen without {v}.",
            "An uncle gave {s} {v}.",
        ),
        (
            "Which animal does {s} keep?",
            "What animal belongs to {s}?",
            "Which animal does {s} have?",
        ),
        ("{S} keeps {v}.", "{S} has {v}."),
        ("Who keeps {v}?", "Who has {v}?"),
        about_people=True,
    ),
    Kind(
        "food",
        PEOPLE,
        FOODS,
        (
            "{S} likes {v} best.",
            "{S} is very fond of {v}.",
            "{S} always asks for {v}.",
            "{S} eats {v} every day.",
            "Nothing pleases {s} more than {v}.",
        ),
        ("What does {s} like to eat?", "Which food does {s} like best?", "What is {s} fond of?"),
        ("{S} likes {v} best.", "{S} is very fond of {v}."),
        ("Who likes {v} best?", "Who is fond of {v}?"),
        about_people=True,
    ),
    Kind(
        "room",
        _the(OBJECTS),
        _the(PLACES),
        (
            "{S} is in {v}.",
            "{S} was left in {v}.",
            "{S} can be found in {v}.",
            "Somebody put {s} in {v}.",
            "They keep {s} in {v}.",
        ),
        ("Where is {s}?", "Where can I find {s}?", "In which place is {s}?"),
        ("{S} is in {v}.", "You can find {s} in {v}."),
        ("What is in {v}?", "Which thing is in {v}?"),
    ),
    Kind(
        "container",
        _the(OBJECTS),
        _the(CONTAINERS),
        (
            "{S} lies in {v}.",
            "{S} was hidden in {v}.",
            "Someone locked {s} in {v}.",
            "They packed {s} into {v}.",
            "You will see {s} if you open {v}.",
        ),
        ("What holds {s}?", "In what is {s} kept?", "What must I open to get {s}?"),
        ("{S} lies in {v}.",),
        ("What lies in {v}?", "What was hidden in {v}?"),
    ),
    Kind(
        "owner",
        _the(OBJECTS),
        PEOPLE,
        (
            "{S} belongs to {v}.",
            "{S} is the property of {v}.",
            "{S} was a gift to {v}.",
            "They sold {s} to {v}.",
            "I know that {s} belongs to {v}.",
        ),
        ("Who owns {s}?", "To whom does {s} belong?", "Whose property is {s}?"),
        ("{S} belongs to {v}.", "{S} is the property of {v}."),
        ("What belongs to {v}?", "Which thing does {v} own?"),
    ),
    Kind(
        "colour",
        [f"{person}'s {thing}" for person in PEOPLE for thing in BELONGINGS],
        COLOURS,
        (
            "{S} is {v}.",
            "{S} has been painted {v}.",
            "{S} was always {v}.",
            "You will know {s} because it is {v}.",
            "They say that {s} is {v}.",
        ),
        ("What colour is {s}?", "Which colour has {s}?", "What is the colour of {s}?"),
        ("{S} is {v}.",),
        (),
    ),
    Kind(
        "day",
        _the(EVENTS),
        DAYS,
        (
            "{S} is on {v}.",
            "{S} will be held on {v}.",
            "{S} has been moved to {v}.",
            "We go to {s} on {v}.",
            "Do not forget that {s} is on {v}.",
        ),
        ("When is {s}?", "On which day is {s}?", "On what day will {s} be held?"),
        ("{S} is on {v}.", "{S} will be held on {v}."),
        ("What is on {v}?", "What will be held on {v}?"),
    ),
    Kind(
        "count",
        [f"{person} / {thing}" for person in PEOPLE for thing in COUNTED],
        COUNTS,
        (
            "{o} has {v} {i}.",
            "{o} owns {v} {i}.",
            "{o} counted {v} {i}.",
            "There are {v} {i} in the house of {o}.",
        ),
        ("How many {i} does {o} have?", "How many {i} does {o} own?"),
        ("{o} has {v} {i}.",),
        (),
    ),
    Kind(
        "code",
        _the(LOCKS)
        + [f"{person}'s {lock}" for person in PEOPLE for lock in ("locker", "safe", "gate")],
        (),  # any four digits
        (
            "The code of {s} is {v}.",
            "You open {s} with the code {v}.",
            "The number for {s} is {v}.",
            "Write down {v}, it opens {s}.",
        ),
        ("What is the code of {s}?", "Which code opens {s}?", "What is the number for {s}?"),
        ("The code of {s} is {v}.",),
        (),
    ),
)


@dataclass(frozen=True, slots=True)
class Fact:
    kind: Kind
    subject: str
    value: str


@dataclass(slots=True)
class Document:
    """Text in the making, and the character ranges that only the earlier text explains."""

    text: str = ""
    recalls: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, recall: str = "") -> None:
        """Append `text`; its last `recall`, if it holds one, is marked."""
        if recall and (at := text.rfind(recall)) >= 0:
            self.recalls.append((len(self.text) + at, len(self.text) + at + len(recall)))
        self.text += text

    def extend(self, other: Document) -> None:
        shift = len(self.text)
        self.recalls += [(start + shift, end + shift) for start, end in other.recalls]
        self.text += other.text


@dataclass(frozen=True, slots=True)
class Question:
    ask: str
    answer: str
    value: str


@dataclass(frozen=True, slots=True)
class Level:
    """How hard a document is: how many facts, and how much is said between facts and questions."""

    facts: tuple[int, int]
    filler: tuple[int, int]
    reading: float = 0.0
    """Chance that a filler turn is a passage from a book."""


def is_reserved(subject: str, value: str) -> bool:
    """Whether the pair belongs to the held-out documents (about one in eight does)."""
    return zlib.crc32(f"{subject}|{value}".encode()) % 8 == 0


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def fill(template: str, fact: Fact, subject: str | None = None) -> str:
    """The template with the fact's words in it; `subject` may stand for the subject."""
    owner, _, item = fact.subject.partition(" / ")
    shown = fact.subject if subject is None else subject
    return template.format(s=shown, S=_capital(shown), v=fact.value, o=owner, i=item)


_ACKS = (
    "Noted.",
    "I will remember that.",
    "Good, I have it.",
    "Thank you, I keep that in mind.",
    "All right.",
    "That is good to know.",
    "Understood.",
)
_LEADS = (
    "",
    "",
    "",
    "Please remember this.",
    "Here is something to note.",
    "Listen.",
    "One more thing.",
    "Let me tell you something.",
    "Keep this in mind.",
    "By the way.",
)
_SMALL_TALK = (
    ("It has been raining since the morning.", "Then a warm room is the best place."),
    ("I slept badly last night.", "A short walk may do you good."),
    ("The road to the village is closed.", "Then you must take the long way round."),
    ("Dinner was late again today.", "I hope that it was good all the same."),
    ("The wind is strong on the hill.", "Hold on to your hat when you go out."),
    ("My brother wrote me a long letter.", "It must be pleasant to hear from him."),
    ("The church bell rang twice.", "Then it is time to start."),
    ("I am tired of this old chair.", "Perhaps a cushion would help."),
    ("The children are playing in the snow.", "They will come home cold and happy."),
    ("There is a ship in the harbour.", "I wonder where it comes from."),
    ("The soup needs more salt.", "Add it a little at a time."),
    ("We have guests this evening.", "Then let us set the table early."),
    ("The river is high this week.", "It is wise to stay on the bridge."),
    ("I have lost my spectacles.", "Look on the table beside your bed."),
    ("The fire has gone out.", "There is dry wood by the door."),
    ("The train was an hour late.", "At least you had time to read."),
    ("Our neighbour sings at night.", "You could ask for a softer song."),
    ("The roses are in bloom.", "Put some of them in water."),
    ("I must mend my shoes.", "Good leather lasts a long time."),
    ("The baker has raised his prices.", "Bread grows dearer every year."),
    ("A stranger asked me the way.", "I hope that you could help."),
    ("The moon is bright tonight.", "One could almost read by it."),
    ("It is too hot to work.", "Rest in the shade until evening."),
    ("I saw a fox near the wood.", "They come closer in the cold months."),
)
_SCENERY = (
    "It was a quiet morning.",
    "The street was full of people.",
    "A cold wind blew from the hills.",
    "Nobody was in a hurry that day.",
    "The bells rang from the old church.",
    "Rain fell on the roofs.",
    "The talk went on until late.",
    "Somebody laughed at the other table.",
    "The lamps were lit one after the other.",
    "A boy ran past with a letter.",
    "The tea was hot and strong.",
    "Outside a cart went slowly by.",
    "In the evening the sky turned dark.",
    "The old people sat by the fire.",
    "After dinner there was music.",
    "Then they all sat down again.",
    "The summer had been long and dry.",
    "Not one of them wanted to leave.",
)
_READ_LEADS = (
    "Let me read you a page.",
    "Here is a passage from my book.",
    "I found this on the shelf.",
    "Listen to what I have read today.",
)
_READ_REPLIES = (
    "That was a fine page.",
    "Thank you for reading to me.",
    "I should like to hear more of it.",
    "What a curious passage.",
)
_ASK_LEADS = (
    "",
    "",
    "",
    "",
    "Now tell me.",
    "Another question.",
    "Do you remember?",
    "Help me again.",
)
_ANSWER_LEADS = ("", "", "", "", "", "As you told me,", "Yes,", "I remember:")
_STORY_OPENINGS = (
    "This is a story of old friends.",
    "There was once a merry company.",
    "Some people met at the inn.",
    "The neighbours talked about each other.",
    "An old woman told us the following.",
    "Here is what I learned on my journey.",
)
_TALE_LATER = (
    "Later the talk came back to it.",
    "The next day they spoke of it again.",
    "Years later it was still the same.",
    "I asked again, to be sure.",
    "So it stands in the book.",
    "And so they told it everywhere.",
)
_REGISTER_TITLES: dict[str, str] = {
    "home": "Homes",
    "job": "Trades",
    "pet": "Animals",
    "food": "Favourite food",
    "room": "Places",
    "container": "Containers",
    "owner": "Owners",
    "colour": "Colours",
    "day": "Days",
    "count": "Counts",
    "code": "Codes",
}


class StoryWriter:
    """Writes documents of one split; all that is random comes from the `Random` passed in."""

    def __init__(self, split: Split, passage: Callable[[Random], str] | None = None) -> None:
        """`passage` gives a few sentences to read aloud between facts and questions."""
        self._split = split
        self._passage = passage

    # Facts ----------------------------------------------------------

    def facts(self, rng: Random, count: int, kinds: Sequence[Kind] = ()) -> list[Fact]:
        """Facts that look alike: few kinds, each with several subjects and no value twice."""
        kinds = kinds or rng.sample(
            KINDS, k=min(len(KINDS), max(1, rng.randint(1, 1 + count // 3)))
        )
        people = rng.sample(PEOPLE, k=min(len(PEOPLE), max(2, count)))
        found: list[Fact] = []
        used: set[tuple[str, str]] = set()
        for _ in range(count * 8):
            if len(found) == count:
                break
            kind = rng.choice(kinds)
            fact = Fact(kind, self._subject(rng, kind, people), "")
            for _ in range(24):
                value = self._value(rng, kind, people)
                if is_reserved(fact.subject, value) == (self._split == "heldout"):
                    fact = Fact(kind, fact.subject, value)
                    break
            keys = {(kind.name, fact.subject), (kind.name, "=" + fact.value)}
            if kind.name in ("room", "container"):  # one thing lies in one place only
                keys.add(("where", fact.subject))
            if fact.value and not keys & used:
                used |= keys
                found.append(fact)
        return found

    @staticmethod
    def _subject(rng: Random, kind: Kind, people: Sequence[str]) -> str:
        # Owners are few, so that "Tom's coat" meets "Tom's hat" and "Anna's coat".
        few = people[: max(2, len(people) // 2)]
        if kind.name == "colour":
            return f"{rng.choice(few)}'s {rng.choice(BELONGINGS[:: rng.choice((1, 3))])}"
        if kind.name == "count":
            return f"{rng.choice(few)} / {rng.choice(COUNTED[:: rng.choice((1, 3))])}"
        if kind.name == "code" and rng.random() < 0.6:
            return f"{rng.choice(few)}'s {rng.choice(('locker', 'safe', 'gate'))}"
        if kind.name == "code":
            return f"the {rng.choice(LOCKS)}"
        return rng.choice(people) if kind.about_people else rng.choice(kind.subjects)

    @staticmethod
    def _value(rng: Random, kind: Kind, people: Sequence[str]) -> str:
        if kind.name == "code":
            return f"{rng.randrange(10_000):04d}"
        if kind.name == "owner" and rng.random() < 0.7:
            return rng.choice(people)
        return rng.choice(kind.values)

    # Sentences ----------------------------------------------------------

    @staticmethod
    def question(rng: Random, fact: Fact) -> Question:
        """A question about the fact; sometimes for the subject instead of the value."""
        kind = fact.kind
        answer = fill(rng.choice(kind.answers), fact)
        if kind.reverse_questions and rng.random() < 0.25:
            return Question(fill(rng.choice(kind.reverse_questions), fact), answer, fact.subject)
        return Question(fill(rng.choice(kind.questions), fact), answer, fact.value)

    @staticmethod
    def _state(doc: Document, rng: Random, facts: Sequence[Fact], recall: bool = False) -> None:
        """Facts as prose; a person named in the sentence before may become "he" or "she"."""
        last = ""
        for index, fact in enumerate(facts):
            template = rng.choice(fact.kind.statements)
            subject = None
            if (
                fact.kind.about_people
                and fact.subject == last
                and template.startswith("{S}")
                and rng.random() < 0.6
            ):
                subject = "she" if fact.subject in WOMEN else "he"
            last = fact.subject
            sentence = fill(template, fact, subject)
            doc.add((" " if index else "") + sentence, fact.value if recall else "")

    @staticmethod
    def _answer(doc: Document, rng: Random, question: Question) -> None:
        lead = rng.choice(_ANSWER_LEADS)
        answer = question.answer
        if lead.endswith((",", ":")) and answer.startswith(("The ", "You ")):
            answer = answer[0].lower() + answer[1:]
        needle = question.value if question.value in answer else _capital(question.value)
        doc.add(f"Assistant: {lead} {answer}\n" if lead else f"Assistant: {answer}\n", needle)

    def _ask_all(self, doc: Document, rng: Random, facts: Sequence[Fact], share: float) -> None:
        asked = [fact for fact in facts if rng.random() < share] or [rng.choice(facts)]
        rng.shuffle(asked)
        for fact in asked:
            question = self.question(rng, fact)
            lead = rng.choice(_ASK_LEADS)
            doc.add(f"User: {lead} {question.ask}\n" if lead else f"User: {question.ask}\n")
            self._answer(doc, rng, question)

    def small_talk(self, doc: Document, rng: Random, reading: float) -> None:
        """A turn beside the facts; with chance `reading` it is a passage from a book."""
        if self._passage is not None and rng.random() < reading:
            doc.add(f"User: {rng.choice(_READ_LEADS)} {self._passage(rng)}\n")
            doc.add(f"Assistant: {rng.choice(_READ_REPLIES)}\n")
        else:
            said, reply = rng.choice(_SMALL_TALK)
            doc.add(f"User: {said}\nAssistant: {reply}\n")

    # Documents ----------------------------------------------------------

    def write(self, rng: Random, level: Level) -> Document:
        """One document of any form."""
        form = rng.choices(
            (self.chat, self.story, self.register, self.tale), weights=(5, 3, 1, 1.5)
        )[0]
        return form(rng, level)

    def chat(self, rng: Random, level: Level) -> Document:
        """The user tells things, talks of other things, and asks for the former again."""
        facts = self.facts(rng, rng.randint(*level.facts))
        doc = Document()
        self.tell(doc, rng, facts)
        for _ in range(rng.randint(*level.filler)):
            self.small_talk(doc, rng, level.reading)
            if rng.random() < 0.3:
                self._ask_all(doc, rng, facts, share=0.15)
        self._ask_all(doc, rng, facts, share=rng.uniform(0.5, 1.3))
        return doc

    def tell(self, doc: Document, rng: Random, facts: Sequence[Fact]) -> None:
        """The turns in which the user tells `facts`."""
        at = 0
        while at < len(facts):
            told = facts[at : at + rng.randint(1, 3)]
            at += len(told)
            lead = rng.choice(_LEADS)
            doc.add(f"User: {lead} " if lead else "User: ")
            self._state(doc, rng, told)
            doc.add("\nAssistant: ")
            if rng.random() < 0.3:
                again = rng.choice(told)
                doc.add(fill(rng.choice(again.kind.answers), again) + "\n", again.value)
            else:
                doc.add(rng.choice(_ACKS) + "\n")

    def story(self, rng: Random, level: Level) -> Document:
        """A paragraph of prose, then questions about it."""
        facts = self.facts(rng, rng.randint(*level.facts))
        if rng.random() < 0.5:
            facts.sort(key=lambda fact: fact.subject.split("'")[0].split(" / ")[0])
        doc = Document(rng.choice(_STORY_OPENINGS))
        at = 0
        while at < len(facts):
            told = facts[at : at + rng.randint(1, 4)]
            at += len(told)
            doc.add(" ")
            self._state(doc, rng, told)
            if rng.random() < 0.5:
                doc.add(" " + rng.choice(_SCENERY))
            if rng.random() < 0.25:
                doc.add("\n" + rng.choice(_SCENERY))
        doc.add("\n")
        if self._passage is not None and rng.random() < level.reading:
            doc.add(self._passage(rng) + "\n")
        self._ask_all(doc, rng, facts, share=rng.uniform(0.5, 1.3))
        return doc

    def register(self, rng: Random, level: Level) -> Document:
        """Short lists of one kind, copied again in another order."""
        kind = rng.choice([kind for kind in KINDS if kind.name != "code"])
        facts = [fact for fact in self.facts(rng, 3 * level.facts[1]) if fact.kind.name != "code"]
        kind = facts[0].kind if facts else kind
        facts = [fact for fact in facts if fact.kind is kind][: rng.randint(*level.facts)]
        if not facts:
            return self.chat(rng, level)
        doc = Document()
        for copy in range(rng.randint(2, 3)):
            doc.add(_REGISTER_TITLES[kind.name] + ("\n" if copy == 0 else ", once more\n"))
            for fact in facts:
                doc.add(f"- {fact.subject}: {fact.value}\n", fact.value if copy else "")
            rng.shuffle(facts)
        self._ask_all(doc, rng, facts, share=rng.uniform(0.3, 1.0))
        return doc

    def tale(self, rng: Random, level: Level) -> Document:
        """Prose that comes back to its own facts in other words, without any question."""
        facts = self.facts(rng, rng.randint(*level.facts))
        doc = Document(rng.choice(_STORY_OPENINGS) + " ")
        self._state(doc, rng, facts)
        for _ in range(rng.randint(1, 2)):
            doc.add(f" {rng.choice(_SCENERY)} {rng.choice(_TALE_LATER)} ")
            rng.shuffle(facts)
            self._state(doc, rng, facts, recall=True)
        doc.add("\n")
        return doc
