"""Plain prose, written for the reference prompts; `reference.py` cuts its prompts out of it."""

PARAGRAPHS = (
    "The ferry left the north quay at ten past six, while the harbour lamps were still lit. Two trucks, a van with "
    "a broken tail light and eleven people on foot had come aboard. The captain counted them twice, as she did every "
    "morning, wrote the number into the log and rang the bell. Nobody on deck spoke. The water was flat and grey, "
    "and the far shore could be told from the sky only by a thin line of trees.",
    "A good log book says what was seen, not what was thought. When the wind turned, the mate wrote down the hour "
    "and the new direction, and nothing else. Years later a student found in those dull columns the exact day on "
    "which the great storm had begun, three hundred kilometres to the west, a full night before the newspapers "
    "noticed it.",
    "def count_words(text):\n    counts = {}\n    for word in text.lower().split():\n        counts[word] = "
    "counts.get(word, 0) + 1\n    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))\n\nThe "
    "function above returns the words of a text with the most frequent first. Words that are equally frequent come "
    "in alphabetical order, so that two runs over the same text always print the same list.",
    "To make bread you need flour, water, salt and time. Mix 500 grams of flour with 350 grams of water and 10 "
    "grams of salt. Add a spoon of starter, fold the dough four times, once every half hour, and leave it in a cool "
    "place overnight. In the morning it should have doubled. Heat the oven to 240 degrees, bake for 20 minutes with "
    "the lid on and for 25 minutes without it, and let the loaf cool before you cut it.",
    "Rivers do not like straight lines. Where the bank is soft, the outer side of a bend is worn away and the inner "
    "side grows, so each bend becomes rounder until the river cuts through its neck and leaves a lake behind. From "
    "the air one can see hundreds of these lakes, shaped like thin moons, and read from them where the water ran a "
    "thousand years ago.",
    "Question: A train leaves the first town at 9:15 and arrives in the second town at 11:45. The distance is 200 "
    "kilometres. What is its average speed? Answer: the journey takes two and a half hours, and 200 divided by 2.5 "
    "is 80, so the average speed is 80 kilometres per hour. Question: The next train needs 3 hours for the same "
    "distance. How much slower is it?",
    "My grandmother kept the letters in a tin that had once held tea. There were forty-one of them, all from the "
    "same winter, and all began with the weather. Only when I put them in order did I see that the weather was a "
    "code: on clear days he had been paid, on foggy days he had not, and it rained on the days when he missed her.",
    "The committee met on Tuesday to discuss three proposals. The first, to repair the roof of the library, was "
    "accepted without a vote. The second, to close the main street to cars on Sundays, was sent back for a study of "
    "its costs. The third, which nobody had read, was postponed until September. The meeting ended at a quarter to "
    "nine, and the caretaker turned off the heating.",
    "In a computer, memory is handed out in pages. A program that asks for a little gets a whole page, and most of "
    "it stays empty; a program that asks for a lot gets many pages, and they need not lie next to each other. A "
    "table tells which page comes first, which second, and so on. If the table is lost, the data is still there, "
    "but nobody can say any longer in what order it should be read.",
    "Bees tell each other where the flowers are by dancing. The angle of the dance is the angle between the flowers "
    "and the sun, and the length of its straight part is the distance. A bee that has danced for a while corrects "
    "the angle, because the sun has moved. She does this in a dark hive, where the sun can't be seen at all.",
    "Once there was a clockmaker who could not bear to be late. He set every clock in his shop five minutes ahead, "
    "and when he got used to that, ten. In the end the whole town ran by his windows, and was early for everything, "
    'and had to wait. "It is the fault of the others," said the clockmaker, "who are always on time."',
    "The lighthouse on the cape was built in 1868 out of granite that had to be landed by boat. It took four summers. "
    "Its first lamp burned rape seed oil, its second paraffin, and since 1931 it has been electric. The light can be "
    "seen from 19 sea miles away: two flashes, then nine seconds of darkness. Its last keeper left in 1984 and took "
    "with him only a chair, a radio and the cat.",
    "Salt was once worth walking for. The road from the coast to the mines in the hills is nine days long, and along "
    "it stand forty wells, each a day's walk from the next for a loaded camel and half a day's for a man alone. "
    "Whoever dug them kept no records, but the ropes have worn grooves in the stone, and from the depth of the grooves "
    "one can guess how many buckets were drawn: at the third well, some two million.",
    "Dear Anna, thank you for the parcel. The boots fit, the book is already half read, and the cake arrived in a "
    "state that we agreed to call crumbs and ate with spoons. We have had snow since the second of November. The "
    "road is open twice a week, on Mondays and Thursdays, if the plough starts. Please send candles, batteries, and "
    "news of any kind, even bad, since here we have had none at all for three weeks.",
    "SELECT name, COUNT(*) AS visits FROM guests JOIN stays ON stays.guest = guests.id WHERE stays.year = 2019 GROUP "
    "BY name HAVING COUNT(*) > 2 ORDER BY visits DESC; The query lists the guests who came more than twice in one "
    "year. If two guests have the same name they are counted as one person, which is a mistake: it should group by "
    "the identifier, and show the name only.",
    "A violin is made of about seventy pieces of wood. The top is spruce, split and not sawn, so that its fibres run "
    "from end to end; the back is maple, chosen for its weight as much as for its flames. Inside stands a small post "
    "that is not glued to anything. It carries the sound from one plate to the other, and if it falls over, the "
    "instrument whispers. The French call it the soul.",
    "How to cross a glacier: go early, while the snow is hard. Walk in a line, with a rope between you that is neither "
    "tight nor slack. The lightest goes first. Look for long shallow dips in the snow, for they may be bridges over "
    "cracks, and cross them at a right angle. If somebody falls, the others sit down at once, dig in their heels, and "
    "only then begin to discuss what went wrong.",
)
