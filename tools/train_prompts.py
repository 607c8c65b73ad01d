"""Builds the prompts from which a draft head for a chat model is trained, in the forms that Spec-Bench has.

    python tools/train_prompts.py --data FOLDER --model smollm2-135m --out prompts.jsonl [--held-out held_out.jsonl]

FOLDER holds public sets. Prompts are taken from gsm8k/train, svamp, mbxp, bbh, cruxeval and self_instruct, and made
from the word lists below; the passages to summarise, to question and to rewrite are written by --model itself, so that
no foreign text is needed, and each is used at most once for each of the three. Each line of the output is
{"id": "math-123", "kind": "math", "user": "..."}; every 40th goes to --held-out instead, if that is given. The same
folder, model, number of passages and seed give the same files.

spec_bench, mt_bench, humaneval and gsm8k/test are for evaluation only. Of these, near-duplicates are dropped. Text is
compared in lower case, as words without punctuation and without its lead ("Translate German to English:",
"Summarize:"). A prompt is dropped if it equals an evaluation prompt or a line of one, which is how short ones are
compared, or if eight words in a row stand in an evaluation prompt. Eight words that three or more different evaluation
prompts share are a common phrase ("how much money does she have left over") and do not count. Dropped as well are
prompts of more than 6,000 characters and repetitions. How many, by source, is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem import LLM, SamplingParams
from tandem.bench.prompts import load_prompts

RUN = 8
"""Words in a row that make a near-duplicate."""
COMMON = 3
"""Evaluation prompts that share a run of words, from which on it is a common phrase."""
LONGEST = 6000
"""Characters of the longest prompt."""
HELD_OUT = 40
"""Of so many prompts, one is held out."""
LEADS = re.compile(r"^\s*(translate german to english|summarize)\s*:", re.IGNORECASE)


def listed(text: str) -> list[str]:
    """The parts of a list that is written in running text, set apart by semicolons."""
    return [" ".join(part.split()) for part in text.split(";")]


TOPICS = listed("""
    tea; coral reefs; lighthouses; black holes; beekeeping; chess; bicycles; volcanoes; the printing press; origami;
    glaciers; sourdough bread; renewable energy; public libraries; electric cars; jazz music; mushrooms; the stock
    market; vaccines; wolves; sleep; photography; suspension bridges; earthquakes; pottery; olive oil; satellites;
    the Silk Road; rice farming; space telescopes; steam engines; mountain climbing; opera; antibiotics; tides;
    whales; carnival masks; microscopes; typography; city parks; meditation; robotics; submarines; chocolate;
    migratory birds; recycling; maps; medieval castles; honey; rainforests; solar eclipses; the human heart; weather
    forecasts; silk; calligraphy; deserts; marathon running; video games; wind turbines; penguins; coffee houses;
    clocks; cryptography; gardening; folk tales; comets; cheese making; trains; the immune system; democracy; salt
    mines; puppet theatre; dinosaurs; glass blowing; supply chains; watercolour painting; remote work; the ozone
    layer; sailing ships; tea ceremonies; genetics; spices; inflation; ballet; artificial intelligence; wetlands;
    kites; the violin; archery; lightning; online education; ants; airports; sign language; cinema; batteries;
    national parks; crossword puzzles; horses; the Moon; surfing; canals; windmills; mosaics; minimum wages; bamboo;
    drones; the nervous system; noodles; hot air balloons; fossils; rivers; insurance; symphony orchestras; school
    lunches; comic books; hurricanes; knitting; elephants; the periodic table; street markets; philosophy; soil; ice
    hockey; perfume; water purification; social media; potatoes; owls; poetry; quantum computers; fire brigades;
    gravity; wood carving; Roman roads; stamps; vegetarian cooking; sharks; museums; mental health; family budgets;
    time zones; radio; caves; tennis; bridges; seeds; plastic waste; public transport; nutrition; podcasts; the water
    cycle; cats; job interviews; taxes; rockets; tulips; fishing villages; hospitals; magnetism; allergies; harbours;
    theatre; skyscrapers; lakes; backpacking; wine growing; cyber security; friendship
""")
EVENTS = listed("""
    a fire at a furniture warehouse; the opening of a new bridge; a record harvest of apples; a strike of bus drivers;
    the rescue of four lost hikers; a robbery at a jewellery shop; the discovery of an ancient tomb; a school closure;
    the birth of twin elephants at the zoo; a flood in the old town; an election for mayor; a power cut lasting two
    days; a surprise win of the local football team; a dispute over a new airport; the trial of a former bank manager;
    the return of wolves; a chess tournament for children; a train accident; a protest against rising rents;
    a heat wave; the sale of a famous hotel; a lottery winner who gave everything away; a storm that tore off roofs;
    a dog that saved a family; the first electric ferry; a hospital that ran out of beds; a stolen painting that came
    back; a food festival; a factory that will close; a scientist who won a prize; an outbreak of food poisoning;
    a cyclist riding around the world; a court ruling on noise; a cargo ship run aground; a reunion after fifty years;
    a plan to ban cars; a teacher who retired at ninety; an unusual wedding; the theft of a statue; a bear seen in a
    garden; a rise in the price of bread; an escape from prison; a new vaccine trial; a pop star's cancelled concert
""")
PLACES = listed("""
    Lisbon; Nairobi; Osaka; Denver; Bergen; Lima; Cardiff; Jakarta; Kraków; Auckland; Montreal; Accra; Naples; Leeds;
    Valencia; Tallinn; Hanoi; Phoenix; Marseille; Cape Town; Ghent; Mumbai; Reykjavik; Portland; Salzburg; Bogotá;
    Perth; Galway; Tucson; Izmir; Quito; Malmö; Savannah; Split; Busan; Halifax; Toledo; Dakar; Boise; Aberdeen
""")
ARTICLES = listed("""
    Write an encyclopedia article about {}.; Write an encyclopedia article about the history of {}.;
    Write a detailed article about {} for a general reader, with names, dates and numbers.;
    Write a magazine article about {} and the people who care about it.
""")
REPORTS = listed("""
    Write a news report about {}.; Write a newspaper article about {}, with quotes from people who were there.;
    Write a news story about {}. Give names, ages, dates and numbers.
""")
REWRITES = listed("""
    Rewrite the following text in simpler words: {}; Extract all names of people and places from this text: {};
    List all dates and numbers in the following text, one a line: {}; Give the following text a title: {};
    Turn the text below into bullet points. {}; Write three questions that this text answers: {};
    Rewrite this as a letter to a friend: {}; Correct the mistakes in the following text: {}; Continue this text: {};
    What is the tone of the text below? Quote the words that show it. {}; Shorten this text to two sentences: {};
    Rewrite the following text so that a child of eight understands it: {}; Rewrite this text in a formal style: {};
    Extract the most important facts from the text as a JSON list of strings. {}; State the main point: {}
""")
RAG_NEWS = listed("""
    What happened in {}; Who was involved in the story of {}; What did people say about {}; When did it come to {};
    What was the result of {}; Why was there {}; Where did people hear about {}; How many people were affected by {}
""")
RAG_THINGS = listed("""
    What is the history of {}; What are the main kinds of {}; Why did people become interested in {}; Where do you
    find {}; When did people first write about {}; Who is known for work on {}; What are the uses of {}; What is
    special about {}; How did {} change over time; What is the meaning of {} today; Which countries are known for {};
    How do experts see {}
""")

BOOKS = """Moby-Dick; The Hobbit; Frankenstein; War and Peace; Don Quixote; Dune; Emma; The Trial; Little Women;
    Dracula; The Odyssey; Jane Eyre; Treasure Island; Middlemarch; Ulysses; Faust; The Stranger; Beloved; Catch-22;
    Watership Down; Anna Karenina; The Great Gatsby; Brave New World; Charlotte's Web; The Jungle Book; Peter Pan;
    Robinson Crusoe"""
FILMS = """Casablanca; Jaws; Titanic; The Godfather; Alien; Psycho; Rocky; Vertigo; Gladiator; Toy Story; Amadeus; Up;
    The Matrix; Blade Runner; Chinatown; Spirited Away; Ben-Hur; Goodfellas; Inception; Back to the Future; Fargo;
    Frozen; Forrest Gump; Jurassic Park; The Sting; Metropolis; Some Like It Hot; The Lion in Winter; Groundhog Day;
    Home Alone"""
SHOWS = """Friends; The Office; Doctor Who; Cheers; Twin Peaks; Sesame Street; The Crown; Downton Abbey; Lost; Frasier;
    Breaking Bad; The Simpsons; Star Trek; Seinfeld; The Wire; House; Stranger Things; Columbo; Fawlty Towers; Mad
    Men"""
SONGS = """Yesterday; Imagine; Hotel California; Respect; Waterloo; Thriller; Hallelujah; Purple Rain; Let It Be;
    Africa; Bohemian Rhapsody; Stand by Me; Dancing Queen; Space Oddity; Jolene; What a Wonderful World;
    Superstition; Take On Me; Summertime; Johnny B. Goode; Billie Jean; Fast Car; Blue Suede Shoes; My Way; American
    Pie; Born to Run; La Bamba"""
PAINTINGS = """The Starry Night; Guernica; The Scream; The Night Watch; Las Meninas; The Birth of Venus; Water Lilies;
    Girl with a Pearl Earring; The Kiss; American Gothic; The Persistence of Memory; The Hay Wain; Nighthawks"""
COUNTRIES = """Portugal; Kenya; Japan; Peru; Norway; Egypt; Canada; Poland; Vietnam; Chile; Greece; Nigeria; Mongolia;
    Turkey; Iceland; Morocco; Hungary; Thailand; Cuba; Finland; Ethiopia; Jordan; Bolivia; Nepal; Ireland; Senegal;
    Laos; Brazil; Romania; Ghana; Austria; Pakistan; Panama; Sweden; Zambia; Georgia; Ecuador; Belgium; Malaysia; New
    Zealand"""
SIGHTS = """the Colosseum; Machu Picchu; the Taj Mahal; Stonehenge; the Golden Gate Bridge; Mount Kilimanjaro; Petra;
    Niagara Falls; the Eiffel Tower; Angkor Wat; the Dead Sea; Lake Baikal; the Great Barrier Reef; Neuschwanstein
    Castle; the Panama Canal; the Kremlin; Easter Island; Mount Fuji; the Hoover Dam; Loch Ness; the Alhambra; the
    Gobi Desert"""
INVENTIONS = """the telephone; the light bulb; penicillin; the steam engine; dynamite; the telescope; the zipper;
    radium; the World Wide Web; the ballpoint pen; X-rays; the safety pin; the barometer; oxygen; the jet engine;
    insulin; Velcro; the microwave oven; the sewing machine; the bicycle; the thermometer; the parachute; aspirin;
    the elevator; braille"""
HISTORY = """the French Revolution; the Great Fire of London; the Thirty Years' War; the Gold Rush; the Boston Tea
    Party; the fall of the Berlin Wall; the Black Death; the Battle of Hastings; the Suez Crisis; the Russian
    Revolution; the Moon landing; the Great Depression; the Meiji Restoration; the Boer War; the Hundred Years' War;
    Prohibition; the Spanish Armada; the Congress of Vienna; the Wright brothers' first flight; the Irish potato
    famine"""
SCIENCE = """photosynthesis; osmosis; a prime number; DNA; inertia; an isotope; the ozone layer; a logarithm; plasma;
    a catalyst; refraction; the mantle of the Earth; a neuron; an enzyme; entropy; a light year; condensation; mitosis;
    a hypothesis; an alloy; erosion; a food chain; friction; a chromosome; the big bang; an acid; evaporation; a vector;
    a transistor; the pancreas; haemoglobin; a tsunami; the equator; sonar; a supernova; metamorphosis; static
    electricity"""
ANIMALS = """a cow; an octopus; a spider; a snail; a giraffe; a honey bee; a shark; a polar bear; an ostrich; a bat;
    a frog; a blue whale; a kangaroo; a tortoise; a camel; a penguin; an eagle; a hedgehog; a butterfly; a chameleon;
    a crocodile"""
SPORTS = """the World Cup in football; the Tour de France; Wimbledon; the Super Bowl; the Davis Cup; the Ryder Cup;
    the Stanley Cup; the Boston Marathon; the World Series; the Six Nations; the America's Cup; the Ashes; the
    Masters"""
YEARS = "; ".join(str(year) for year in range(1958, 2020, 3))
QUESTIONS = listed("""
    Who wrote {book}; When was {book} published; Who is the main character in {book}; Where does {book} take place;
    Who directed {film}; When did {film} come out; Who played the lead in {film}; How long is the movie {film};
    Where was {film} filmed; How many seasons of {show} are there; When did {show} first air; Who plays the father in
    {show}; Who sang {song}; Who wrote the song {song}; What year did {song} come out; What is the song {song} about;
    Who painted {painting}; Where is {painting} now; What is the capital of {country}; What is the currency of
    {country}; What is the longest river in {country}; What language do they speak in {country}; How many people live
    in {country}; When did {country} become independent; What is the highest mountain in {country}; What is the
    national dish of {country}; Who is the head of state of {country}; Which countries border {country}; What are the
    colors of the flag of {country}; Where is {sight}; How old is {sight}; Why is {sight} famous; Who invented or
    discovered {invention}; In which year was {sight} first visited by tourists; When was {invention} invented or
    discovered; What came before {invention}; When did {history} begin; What caused {history}; How long did {history}
    last; Where did {history} take place; What is {science}; What is the meaning of {science} in science; Who first
    described {science}; Why is {science} important; How does {science} work; How long does {animal} live; What does
    {animal} eat; How fast is {animal}; Where does {animal} live; How much does {animal} weigh; How many bones does
    {animal} have; How many teeth does {animal} have; Who won {sport} in {year}; How often is {sport} held; Where was
    {sport} held in {year}; Who has won {sport} most often; Who won the Nobel Prize in literature in {year}; Who was
    president of the United States in {year}; What was the most popular song of {year}; Which film won best picture
    in {year}; Where does the word for {topic} come from; When did people learn of {topic}; Which country is best
    known for {topic}; What is the most famous book about {topic}
""")

ROLES = """a ship's captain; a detective; a museum guide; a medieval knight; a nurse; a football coach; a travel agent;
    a grandmother; a robot; a chef; a judge; a farmer; a physics teacher; a journalist; a pirate; a tour guide on Mars;
    a bank clerk; a gardener; a librarian; an architect; a dragon; a career adviser; a time traveller; a mountain
    guide"""
READERS = """a child of six; my grandfather; a new colleague; a class of teenagers; a busy manager; a tourist; a
    beginner; a city council; the readers of a local newspaper; a friend who is sceptical; a team of engineers; new
    parents"""
TONES = "funny; serious; warm; formal; short; persuasive; lively; calm; dramatic; plain; hopeful; ironic"
NUMBERS = "three; four; five; six; seven; eight; ten"
LANGUAGES = "Python; Java; JavaScript; C++; Go; Rust; C; SQL; HTML; Ruby"
PROGRAMS = """counts the words of a file; sorts a list of names; plays tic-tac-toe; keeps a to-do list; checks
    passwords; converts temperatures; draws a calendar; finds duplicate files; reads a CSV file; guesses a number;
    rolls dice; reverses a linked list; validates e-mail addresses; computes compound interest; searches a sorted
    list; parses dates; merges two dictionaries; finds the shortest path in a grid; shuffles cards; shows a
    stopwatch; encrypts a message"""
NAMES = """Anna; Omar; Lucy; Kenji; Maria; Peter; Fatima; Jack; Ingrid; Carlos; Priya; Tom; Elena; Samuel; Mei; Paul"""
FEELINGS = "delighted; bored; worried; amazed; let down; content; furious; a bit confused; grateful; unimpressed"
CHATS = listed("""
    Write a {tone} blog post about {topic}.; Write an email to {reader} about {topic}.; Tell me a {tone} story about
    {topic}.; Write a {tone} poem about {topic}.; Explain {topic} to {reader}.; What are the pros and cons of {topic}?;
    Draft an outline for a talk on {topic} in front of {reader}.; You are {role}. Talk to me about {topic}.;
    Make a step by step plan for somebody who wants to learn all about {topic}.; Compare {topic} and {topic2}.;
    Pretend that you are {role} and love {topic}. Introduce yourself.; Give me {n} tips about {topic}.;
    Write a {tone} dialogue between {role} and {role2} about {topic}.; How do I get started with {topic}?;
    Write {n} interview questions for an expert in {topic}.; What would {role} say about {topic}?; Why should I care
    about {topic}?; Write a product description for a board game about {topic}.; Suggest {n} titles for a book on
    {topic}.; What are common misunderstandings about {topic}?; Write a speech about {topic} for {reader}.; Give me a
    quiz on {topic}.; Describe the influence of {topic} on art and literature.; What is the economic importance of
    {topic}?; Define {topic}.; Discuss the ethical questions around {topic}, and give examples.; How did {topic}
    shape the history of {country}?; Which scientific principles are behind {topic}? Explain them in {n} sentences.;
    What is {science}? Give an example.; Explain the difference between {science} and {science2}.; Describe an
    experiment that shows {science} to a class.; What would the world be like without {topic}? Reason step by step.;
    Plan a weekend in {place} for {reader}.; Write a {tone} review of a restaurant in {place}.; Write a letter from
    {role} in {place} to {name}.; {name} is taller than {name2}, and {name2} is taller than {name3}. Who is the
    smallest? Explain.; {name} is tired of hearing about {topic}. {name2} disagrees. Write both of their arguments.;
    Sort these into groups and name the groups: {topic}, {animal}, {country}, {topic2}, {animal2}, {country2}.;
    Extract the person, the city and the subject as JSON: "{name} came to {place} to give a lecture on {topic}."; Is
    the writer of each line positive or negative? 1. I was {feel} by the film. 2. The book left me {feel2}.; Fill in
    the table with name, city and hobby: {name} from {place} likes {topic}, and {name2} from {place2} likes
    {topic2}.; Translate into French, Spanish and German: "My friend {name} is interested in {topic}."; Write a
    {language} program that {program}.; How would you test a program that {program}? Show it in {language}.; I want
    to write something in {language} that {program}. Explain the steps.; Write a {tone} haiku on {topic}.; Describe
    {sight} to someone who has never seen it.; What should {reader} know about {history}?; What were the causes and
    the consequences of {history}?; Write a diary entry of {role} during {history}.; Invent a conversation in which
    {name} learns of {invention} for the first time.; Summarize {book} in {n} sentences.; Recommend {n} films to
    someone who liked {film}, with reasons.; Write a {tone} toast for the birthday of {name}.; Help me write a {tone}
    message to {reader}: I will be late because of {topic}.; Write a song about {place} and {topic}.; Create a lesson
    plan about {science} for {reader}.; Write a cover letter for a job that has to do with {topic}.; What is the
    relation between {topic} and {science}?; Write a fable about {animal} and {animal2}.; Give {n} arguments for and
    {n} against a law about {topic}.; Write a {tone} slogan and a text for a poster on {topic}.
""")
SLOTS = {
    name: listed(text)
    for name, text in {
        "book": BOOKS, "film": FILMS, "show": SHOWS, "song": SONGS, "painting": PAINTINGS, "country": COUNTRIES,
        "sight": SIGHTS, "invention": INVENTIONS, "history": HISTORY, "science": SCIENCE, "animal": ANIMALS,
        "sport": SPORTS, "year": YEARS, "role": ROLES, "reader": READERS, "tone": TONES, "n": NUMBERS, "name": NAMES,
        "language": LANGUAGES, "program": PROGRAMS, "feel": FEELINGS,
    }.items()
} | {"topic": TOPICS, "place": PLACES}  # fmt: skip

GERMAN_SLOTS = {
    name: listed(text)
    for name, text in {
        "wer": """der Bürgermeister; die Regierung; der Verein; die Polizei; der Minister; die Universität; das
            Unternehmen; der Trainer; die Gewerkschaft; der Richter; die Zeitung; das Museum; die Kanzlerin; der
            Vorstand; die Schule; der Forscher; die Stadtverwaltung; das Krankenhaus; die Opposition; der Sprecher;
            die Feuerwehr; die Bank""",
        "viele": """die Anwohner; viele Schüler; die Bauern; zahlreiche Besucher; die Ärzte; mehrere Abgeordnete; die
            Fans; einige Fachleute; die Mieter; tausende Menschen; die Angestellten; zwei Zeugen; die Eltern; junge
            Künstler""",
        "was": """den neuen Haushalt; den Bau einer Brücke; ein umstrittenes Gesetz; die höheren Preise; den alten
            Bahnhof; eine bessere Ausbildung; das Programm für Familien; die Schließung des Werks; den Vertrag mit
            dem Nachbarland; die Ergebnisse der Studie; einen Plan gegen den Lärm; die Reform der Rente; das Stadion
            am Fluss; den Schutz der Wälder; mehr Geld für Schulen; die Sanierung des Rathauses; ein Verbot von
            Plastik""",
        "wo": """in Hamburg; in der Altstadt; auf dem Land; im Süden des Landes; an der Küste; in einem Vorort von Wien;
            im Parlament; in den Alpen; am Hafen; in Zürich; vor dem Rathaus; in Leipzig; auf der Insel; an der Grenze;
            in Europa; im Ruhrgebiet; nahe der Autobahn; in der Provinz; am Stadtrand; in Brüssel; im Gericht""",
        "wann": """am Dienstag; im vergangenen Jahr; vor drei Wochen; am frühen Morgen; im Herbst; nach dem Krieg;
            im Mai 2009; im Juni; während der Ferien; am Wochenende; kurz vor Mitternacht; im 19. Jahrhundert; gestern
            Abend; nach langer Diskussion; zum ersten Mal; trotz des Regens; zum Auftakt der Woche; in der
            vergangenen Nacht""",
        "zahl": "12; 250; 3000; zwei; fünf; 40; 17; hundert; 1,5 Millionen; acht; 75; rund 600; mehr als 20; knapp 90",
        "name": """Thomas Berger; Frau Lindner; Herr Okafor; Julia Hofmann; der Autor; Katrin Vogel; Martin Seidel;
            die Sängerin; Professor Brandt; Lena Kurz; der Pilot; Stefan Wolf; die Richterin; Paul Neumann""",
        "ding": """ein kleines Boot; ein altes Klavier; einen Koffer; eine Landkarte; zwei Fahrräder; ein Haus mit
            Garten; einen Hund; eine seltene Münze; ein Buch über Sterne; eine Flasche Wein; einen roten Mantel;
            frisches Brot""",
        "warum": """weil das Geld fehlt; obwohl viele dagegen waren; damit mehr Menschen Arbeit finden; bevor es zu
            spät ist; weil das Wetter schlecht war; nachdem ein Fehler entdeckt worden war; ohne die Betroffenen zu
            fragen; um Kosten zu sparen; obwohl die Prüfung noch läuft; sodass der Verkehr umgeleitet werden musste;
            da niemand Verantwortung übernehmen wollte; wie ein Sprecher mitteilte; was kaum jemand erwartet hatte""",
        "wie": "schwierig; überraschend; teuer; nicht mehr zeitgemäß; ein großer Erfolg; unsicher; dringend nötig",
        "ort": """eine Stadt an der Donau; ein Fluss im Norden Polens; ein Berg in Tirol; ein Dorf in der Schweiz;
            eine Insel im Mittelmeer; ein See in Bayern; ein Stadtteil von Köln; eine Burg in Böhmen; ein Tal in
            Norwegen""",
    }.items()
}
GERMAN = listed("""
    {wann} hat {wer} {wo} {was} vorgestellt; {wer} will {was} durchsetzen , {warum}; {viele} protestierten {wann} {wo} ,
    {warum}; {name} sagte {wann} , {was} könne man nicht länger aufschieben; {wo} wurden {wann} {zahl} Menschen
    verletzt , {warum}; {name} kaufte {wann} {ding} und reiste damit nach Italien; Ist {wer} bereit , {was} zu
    bezahlen ?; Ich habe {wo} {ding} gesehen , aber {name} wollte mir nicht glauben; {wer} bezeichnete {was} als {wie};
    Seit {zahl} Jahren fordern {viele} {was} , {warum}; {name} wurde {wo} geboren und arbeitete später als Lehrer;
    Nach Angaben der Behörden haben {viele} {wo} {was} abgelehnt; Können Sie mir sagen , wo ich {wo} {ding} finde ?;
    Das Spiel endete {wann} mit einem Unentschieden , {warum}; Wir müssen {was} prüfen , erklärte {name} {wann} {wo};
    {wann} fand {wer} {wo} {ding}; Die Zahl der Unfälle stieg {wo} um {zahl} Prozent , {warum}; Auf dem Foto ist
    {ort} zu sehen; In dem Roman beschreibt {name} , wie {viele} {wo} {ding} suchen; Wenn {wer} nicht hilft , verlieren
    {viele} die Geduld; Meine Schwester hat {wann} {ding} verkauft , {warum}; {viele} halten {was} für {wie} , {name}
    dagegen nicht; „ Niemand hat uns {wann} gewarnt “ , sagte {name}; Es bleibt {wie} , {was} ohne Hilfe zu erreichen;
    Der Zug hatte {wo} {zahl} Minuten Verspätung , {warum}; {wer} rechnet mit {zahl} neuen Arbeitsplätzen {wo};
    Obwohl {name} {wann} krank war , gewann die Mannschaft {wo} {zahl} Spiele; {wer} lehnt {was} ab und nennt den
    Vorschlag {wie}; {wann} öffnete {wo} eine Ausstellung mit {zahl} Bildern , {warum}; {name} und {wer} stritten
    {wann} über die Frage , ob man {was} brauche; Heute kostet das {zahl} Euro , früher war es {wo} kostenlos;
    {ort} zieht jedes Jahr {zahl} Touristen an , {warum}; Laut einer Umfrage wünschen sich {viele} {was}; {wo}
    schneite es {wann} so stark , dass {viele} zu Hause blieben; Bitte bring {wann} {ding} mit , {name} wartet schon
    {wo}
""")


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that the model wrote, what about, and whether as news."""

    topic: str
    news: bool
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the evaluation prompts say: whole, line by line, and as runs of words."""

    wholes: frozenset[str]
    runs: frozenset[str]

    @classmethod
    def read(cls, data: Path) -> Evaluation:
        """All turns of the conversations, and the other sets' prompts."""
        texts = [
            item.text for name in ("humaneval/HumanEval", "gsm8k/test") for item in load_prompts(data / f"{name}.jsonl")
        ]
        for path in (data / "spec_bench" / "question.jsonl", *sorted((data / "mt_bench").glob("*.jsonl"))):
            lines = path.read_text(encoding="utf-8").splitlines()
            texts += [turn for line in lines for turn in json.loads(line)["turns"]]
        different = {normal(text) for text in texts}  # Spec-Bench holds questions of two others
        shared = Counter(run for text in different for run in runs(text))
        lines = {normal(line) for text in texts for line in text.splitlines()}
        return cls(frozenset(different | lines), frozenset(run for run, count in shared.items() if count < COMMON))

    def holds(self, text: str) -> bool:
        """Whether a prompt is in them, or nearly."""
        text = normal(text)
        return text in self.wholes or not self.runs.isdisjoint(runs(text))


def normal(text: str) -> str:
    """A text's words in lower case, without its lead and without punctuation."""
    return " ".join(re.sub(r"[^\w\s]", "", LEADS.sub("", text).lower()).split())


def runs(text: str) -> set[str]:
    """All runs of words of a normal text."""
    words = text.split()
    return {" ".join(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


@dataclass(frozen=True, slots=True)
class Source:
    """Prompts to choose from, and how many are wanted."""

    name: str
    kind: str
    wanted: int
    texts: list[str]


def write_passages(model: str, number: int, seed: int) -> list[Passage]:
    """As many passages as asked for, half of them news and half of them articles, less those that came out short."""
    rng = random.Random(f"passages {seed}")
    news = [f"{event} in {place}" for event in EVENTS for place in PLACES]
    things = TOPICS * (number // len(TOPICS) + 1)
    topics = [*rng.sample(news, min(number // 2, len(news)))]
    topics += rng.sample(things, number - len(topics))
    asked = [rng.choice(REPORTS if i < number // 2 else ARTICLES).format(topic) for i, topic in enumerate(topics)]
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.05, max_tokens=350, seed=seed * number + i)
        for i in range(number)
    ]
    with LLM(model, draft="none", max_rows=64) as llm:
        answers = llm.chat([[{"role": "user", "content": text}] for text in asked], params)
    texts = [" ".join(re.sub(r"[*#_]+", " ", answer.text).split()) for answer in answers]
    about = enumerate(zip(topics, texts, strict=True))
    passages = [Passage(topic, i < number // 2, text) for i, (topic, text) in about if len(text) > 300]
    rng.shuffle(passages)
    return passages


def filled(rng: random.Random, form: str, slots: dict[str, list[str]]) -> str:
    """A form with a word in each slot. {role2} takes from the same list as {role}, but never the same word."""
    words: dict[str, str] = {}

    def word(match: re.Match[str]) -> str:
        if match[0] not in words:
            words[match[0]] = rng.choice([w for w in slots[match[1]] if w not in words.values()])
        return words[match[0]]

    return re.sub(r"\{([a-z]+)\d?\}", word, form)


def made(rng: random.Random, forms: Sequence[str], slots: dict[str, list[str]], number: int) -> list[str]:
    """This many different texts, all forms in turn."""
    texts: dict[str, None] = {}
    for turn in range(20 * number):
        if len(texts) == number:
            break
        texts[filled(rng, forms[turn % len(forms)], slots)] = None
    return list(texts)


def questions(rng: random.Random, number: int) -> list[str]:
    """Trivia as people type it: without capitals, as all of Spec-Bench's is, or, one in four, with them."""
    return [typed(rng, text) for text in made(rng, QUESTIONS, SLOTS, number)]


def typed(rng: random.Random, question: str) -> str:
    """A question as typed: lower case but for its beginning, in three of four."""
    text = question.lower() if rng.random() < 0.75 else question
    return text[0].upper() + text[1:] + "?"


def german(rng: random.Random, data: Path, number: int) -> list[str]:
    """Prompts to translate: all sources that BIG-bench Hard has, the rest made. Half have spaces around punctuation."""
    asked = load_prompts(data / "bbh" / "salient_translation_error_detection.json")
    found = (re.search(r"Source: (.*?)\s*Translation:", item.text, re.DOTALL) for item in asked)
    sources = dict.fromkeys(" ".join(match[1].split()) for match in found if match)
    own = []
    for text in made(rng, GERMAN, GERMAN_SLOTS, number - len(sources)):
        text = text[0].upper() + text[1:] + ("" if text.endswith("?") else " .")
        own.append(text if rng.random() < 0.5 else re.sub(r" ([,.?“])|(„) ", r"\1\2", text))
    return [f"Translate German to English: {text}" for text in (*sources, *own)]


def mbxp(rng: random.Random, data: Path) -> list[str]:
    """Each problem in one language: as code to be completed, with a request before it, or in words alone."""
    by_number: dict[str, dict[str, str]] = {}
    for name, language in (("bp", "Python"), ("bj", "Java"), ("bjs", "JavaScript"), ("bcp", "C++"), ("bg", "Go")):
        (path,) = (data / "mbxp").glob(f"m{name}p_release*.jsonl")
        for item in load_prompts(path):
            by_number.setdefault(item.name.partition("/")[2], {})[language] = item.text
    texts = []
    for number in sorted(by_number, key=int):
        versions = by_number[number]
        language = rng.choice(sorted(versions))
        task = re.search(r'"""\s*(Write an? .*?)\s*(?:>>>|""")', versions.get("Python", ""), re.DOTALL)
        form = rng.random()
        if form < 0.25 and task:
            texts.append(re.sub(r"^Write an? (python )?function", f"Write a {language} function", task[1]))
        elif form < 0.45:
            texts.append(f"Complete this {language} function:\n\n{versions[language].strip()}")
        else:
            texts.append(versions[language])
    return texts


def cruxeval(rng: random.Random, data: Path) -> list[str]:
    """Questions about small Python functions."""
    texts = []
    for line in (data / "cruxeval" / "cruxeval.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        forms = (
            f"What does f({record['input']}) return? Think step by step.",
            f"Find an argument for which this function returns {record['output']}.",
            "Explain what this Python code does.",
            "Rewrite this function with clear names and a docstring.",
        )
        texts.append(f"{rng.choice(forms)}\n\n{record['code']}")
    return texts


def instructions(data: Path) -> list[str]:
    """Self-Instruct's instructions, each with the input of its first instance."""
    texts = []
    for name in ("seed_tasks", "user_oriented_instructions"):
        for line in (data / "self_instruct" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            texts.append(
                "\n\n".join(filter(None, (record["instruction"].strip(), record["instances"][0]["input"].strip())))
            )
    return texts


def reasoning(rng: random.Random, data: Path, number: int) -> list[str]:
    """As many questions of each of BIG-bench Hard's tasks, but for the translations, whose German is used elsewhere."""
    paths = [p for p in sorted((data / "bbh").glob("*.json")) if not p.stem.startswith("salient")]
    return [item.text for p in paths for item in rng.sample(load_prompts(p), number // len(paths))]


def groups(rng: random.Random, passages: Sequence[Passage]) -> Iterator[list[Passage]]:
    """All passages in a new order, each once: alone, or, one time in four, two together."""
    order = rng.sample(passages, len(passages))
    while order:
        yield [order.pop() for _ in range(min(len(order), rng.choice((1, 1, 1, 2))))]


def context(rng: random.Random, passages: Iterable[Passage]) -> str:
    """Pieces of about 100 words as a search finds them: cut anywhere, in no order, a text's first with its title."""
    pieces = []
    for passage in passages:
        words = [passage.topic[0].upper() + passage.topic[1:], *passage.text.split()]
        pieces += [" ".join(words[i : i + 100]) for i in range(0, len(words), 100) if len(words) - i > 20]
    rng.shuffle(pieces)
    return "\n".join(pieces)


def on_passages(rng: random.Random, passages: Sequence[Passage]) -> list[Source]:
    """What is asked about the passages: to summarise them, a question after them, and to rewrite a part of one."""
    summaries = [f"Summarize: {' '.join(p.text for p in group)}" for group in groups(rng, passages)]
    asked = []
    for group in groups(rng, passages):
        question = rng.choice(RAG_NEWS if group[0].news else RAG_THINGS).format(group[0].topic)
        asked.append(f"{context(rng, group)}\n{typed(rng, question)}")
    rewrites = []
    for passage in rng.sample(passages, len(passages)):
        sentences = re.split(r"(?<=[.!?]) ", passage.text)
        part = " ".join(sentences[: rng.randint(2, max(2, len(sentences) - 1))])
        rewrites.append(rng.choice(REWRITES).format(part))
    named = (("summarization", 900, summaries), ("rag", 700, asked), ("rewriting", 340, rewrites))
    return [Source("passages", kind, wanted, texts) for kind, wanted, texts in named]


def sources(data: Path, passages: Sequence[Passage], seed: int) -> list[Source]:
    """All prompts to choose from."""
    rng = random.Random(f"sources {seed}")
    return [
        Source("gsm8k", "math", 1650, [item.text for item in load_prompts(data / "gsm8k" / "train.jsonl")]),
        Source("svamp", "math", 350, [item.text for item in load_prompts(data / "svamp" / "SVAMP.json")]),
        Source("german", "translation", 900, german(rng, data, 920)),
        Source("questions", "qa", 900, questions(rng, 950)),
        Source("self_instruct", "chat", 430, instructions(data)),
        Source("forms", "chat", 1580, made(rng, CHATS, SLOTS, 1620)),
        Source("mbxp", "code", 800, mbxp(rng, data)),
        Source("cruxeval", "code", 200, cruxeval(rng, data)),
        Source("bbh", "reasoning", 800, reasoning(rng, data, 840)),
        *on_passages(rng, passages),
    ]


def chosen(rng: random.Random, source: Source, evaluation: Evaluation, seen: set[str]) -> list[str]:
    """The wanted number of a source's prompts, less what is dropped; prints how many. Adds the prompts to `seen`."""
    kept, dropped = [], Counter[str]()
    for text in rng.sample(source.texts, len(source.texts)):
        if len(text) > LONGEST:
            dropped["too long"] += 1
        elif evaluation.holds(text):
            dropped["near evaluation"] += 1
        elif text.lower() in seen:  # with its punctuation, which is all that some of the reasoning differs in
            dropped["repeated"] += 1
        else:
            seen.add(text.lower())
            kept.append(text)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
    wanted = kept[: source.wanted]
    print(f"{source.kind:14} {source.name:14} {len(wanted):5} of {len(source.texts):5}   dropped: {reasons}")
    return wanted


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the prompts from which a draft head is trained.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the public sets")
    parser.add_argument("--model", default="smollm2-135m", help="writes the passages")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, help="takes every 40th prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passages", type=int, default=700, help="how many the model writes")
    options = parser.parse_args()
    evaluation = Evaluation.read(options.data)
    passages = write_passages(options.model, options.passages, options.seed)
    rng = random.Random(f"choice {options.seed}")
    seen: set[str] = set()
    numbers = Counter[str]()
    rows = []
    for source in sources(options.data, passages, options.seed):
        for text in chosen(rng, source, evaluation, seen):
            rows.append({"id": f"{source.kind}-{numbers[source.kind]}", "kind": source.kind, "user": text})
            numbers[source.kind] += 1
    rng.shuffle(rows)
    held = rows[HELD_OUT - 1 :: HELD_OUT] if options.held_out else []
    if options.held_out:
        del rows[HELD_OUT - 1 :: HELD_OUT]
        write(options.held_out, held)
    write(options.out, rows)
    print(f"{len(rows)} prompts, {len(held)} held out; " + ", ".join(f"{n} {kind}" for kind, n in numbers.items()))


if __name__ == "__main__":
    main()
