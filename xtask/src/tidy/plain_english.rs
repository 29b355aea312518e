//! Checks the language of pages, comments and messages, as CONTRIBUTING.md requires.

use regex_lite::Regex;

use super::{text, tracked};

/// Largest number of lines of a paragraph of a page.
const MOST_LINES: usize = 6;

/// Words at the start of a sentence that hide its subject.
const BAD_STARTS: [&str; 7] = ["Nobody", "Of", "Somebody", "What", "Whatever", "Who", "Whoever"];

/// Habits that make a text hard to follow: the name and pattern of each. `\b` ends a word.
const HABITS: [(&str, &str); 10] = [
    (
        "nobody or somebody as a person",
        r"\bNobody\b|\b(?i:somebody|anybody|whoever)\b|\b(that|which|if|where|when|so|because|but|for|by) nobody\b",
    ),
    ("a clause in the place of a noun", r"\b(?i:what (is|was|are|were|has|had) [^?]*$)"),
    ("a clause in the place of a person", r"\b(for|to|by|of|from|with|than) who\b"),
    ("answers, for returns", r"(^|[.] )Answers (if|that|whether|with)\b"),
    ("of its own", r"\bof (its|their|our|one's) own\b"),
    ("a program that tells or hears", r"\b(told|tells?|telling|hears?)\b"),
    ("data that is here or there", r"\b(is|are|was|were|be|been) (here|there)([.,;:]|$)"),
    ("a negation as the subject", r"(^|[.] )(Nothing|Never|Not) \w"),
    ("a trailing word", r"(,? too|\balone|\banew|\bmeanwhile)[.;]"),
    ("is to have", r"\b(is|are|was|were) to (have|be)\b"),
];

/// A comment, a raw string, a string or a character. The groups are the texts of strings.
const TOKEN: &str =
    r###"(?s)//[^\n]*|\br#"(.*?)"#|\br"([^"]*)"|"((?:[^"\\]|\\.)*)"|'(?:[^'\\\n]|\\.[^'\n]*)'"###;

/// Sources whose string literals are not checked: tests, and programs of developers.
const NO_TEXTS: [&str; 5] =
    ["/tests/", "tests.rs", "/testing", "crates/containerd-api/", "xtask/src/tidy/"];

/// Pages that are exempt from these rules, with the reason.
const OTHERS: [(&str, &str); 1] = [("docs/json.md", "made from the types of reports")];

/// A paragraph, an item of a list, or a cell of a table.
#[derive(Debug, PartialEq, Eq)]
struct Paragraph {
    /// Number of the first line, from 1.
    line: usize,
    /// Number of lines.
    lines: usize,
    /// Text, with each code span as one word.
    text: String,
}

fn paragraphs(page: &str) -> Vec<Paragraph> {
    let mut all = Vec::new();
    let mut is_code = false;
    let mut goes_on = false;
    for (number, line) in page.lines().enumerate() {
        let line = line.trim();
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        if is_fence || is_code || line.is_empty() || line.starts_with('#') {
            goes_on = false;
        } else if line.starts_with('|') {
            goes_on = false;
            let cells = line.trim_matches('|').split('|');
            all.extend(cells.map(|it| Paragraph { line: number + 1, lines: 1, text: it.into() }));
        } else {
            let item = line.split_once(' ').filter(|(mark, _)| {
                let digits = mark.trim_end_matches('.');
                matches!(*mark, "-" | "*")
                    || digits != *mark && digits.bytes().all(|it| it.is_ascii_digit())
            });
            match all.last_mut() {
                Some(last) if goes_on && item.is_none() => {
                    last.lines += 1;
                    last.text += " ";
                    last.text += line;
                }
                _ => {
                    let text = item.map_or(line, |(_, rest)| rest).into();
                    all.push(Paragraph { line: number + 1, lines: 1, text });
                }
            }
            goes_on = true;
        }
    }
    for paragraph in &mut all {
        paragraph.text = without_code(&paragraph.text);
    }
    all
}

/// Returns the comments of a Rust source. Consecutive lines are one paragraph, and code blocks are left out.
fn comments(source: &str) -> Vec<Paragraph> {
    let mut all: Vec<Paragraph> = Vec::new();
    let mut is_code = false;
    let mut goes_on = false;
    for (number, line) in source.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            (goes_on, is_code) = (false, false);
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim();
        let is_fence = comment.starts_with("```");
        is_code ^= is_fence;
        if is_fence || is_code || comment.is_empty() || comment.starts_with(['#', '-', '|']) {
            goes_on = false;
            continue;
        }
        match all.last_mut() {
            Some(last) if goes_on => {
                last.lines += 1;
                last.text += " ";
                last.text += comment;
            }
            _ => all.push(Paragraph { line: number + 1, lines: 1, text: comment.into() }),
        }
        goes_on = true;
    }
    for paragraph in &mut all {
        paragraph.text = without_code(&paragraph.text);
    }
    all
}

/// Returns the string literals of a Rust source that are texts of at least three words, such as messages, hints and
/// help. Reads up to the module of unit tests.
fn texts(source: &str) -> Vec<Paragraph> {
    let end = source.find("#[cfg(test)]\nmod tests {").unwrap_or(source.len());
    let source = source.get(..end).unwrap_or(source);
    let token = Regex::new(TOKEN).unwrap();
    let (escape, hole) = (Regex::new(r"\\\n\s*").unwrap(), Regex::new(r"\{[^{}]*\}").unwrap());
    let mut all = Vec::new();
    for found in token.captures_iter(source) {
        let Some(literal) = found.iter().skip(1).flatten().next() else { continue };
        let text = escape.replace_all(literal.as_str(), "").replace("\\n", "\n");
        let is_text = hole.replace_all(&text, "").split_whitespace().count() >= 3;
        if is_text && text.contains(' ') {
            let line = source.get(..literal.start()).unwrap_or_default().matches('\n').count() + 1;
            // Each line of a text begins a sentence.
            let parts = text.lines().map(str::trim).filter(|it| !it.is_empty());
            all.extend(parts.map(|it| Paragraph { line, lines: 1, text: without_code(it) }));
        }
    }
    all
}

/// Returns a text with each code span as one word.
fn without_code(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts.map(|(place, part)| if place % 2 == 0 { part } else { "Code" }).collect()
}

/// Splits a text into sentences. A sentence ends if a word ends with a stop and the next word begins like a sentence.
fn sentences(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut has_ended = false;
    for word in text.split_whitespace() {
        let begins = word.starts_with(|it: char| it.is_uppercase() || "*\"(".contains(it));
        if has_ended && begins {
            all.push(String::new());
        }
        has_ended = word.trim_end_matches(['*', ')', '"']).ends_with(['.', '!', '?']);
        if let Some(last) = all.last_mut() {
            if !last.is_empty() {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    all
}

/// Finds habits in paragraphs.
struct Reader {
    habits: Vec<(&'static str, Regex)>,
}

impl Reader {
    fn new() -> Self {
        let habits = HABITS.map(|(name, pattern)| (name, Regex::new(pattern).unwrap()));
        Self { habits: habits.into() }
    }

    /// Returns each habit with its line.
    fn habits(&self, paragraphs: &[Paragraph]) -> Vec<String> {
        let mut found = Vec::new();
        for Paragraph { line, text, .. } in paragraphs {
            for sentence in sentences(text) {
                if sentence.ends_with('?') {
                    continue;
                }
                let words = sentence.trim_start_matches(['*', '(', '"']);
                let start = words.split(' ').next().unwrap_or_default();
                if BAD_STARTS.contains(&start) {
                    found.push(format!("{line}: begins with {start}: {sentence}"));
                }
                let seen = self.habits.iter().filter(|(_, pattern)| pattern.is_match(words));
                found.extend(seen.map(|(name, _)| format!("{line}: {name}: {sentence}")));
            }
        }
        found
    }

    /// Returns the habits and the long paragraphs of a page.
    fn page(&self, page: &str) -> Vec<String> {
        let paragraphs = paragraphs(page);
        let long = paragraphs.iter().filter(|it| it.lines > MOST_LINES);
        let long = long.map(|it| format!("{}: a paragraph of {} lines", it.line, it.lines));
        long.chain(self.habits(&paragraphs)).collect()
    }
}

#[test]
fn pages_comments_and_messages_are_in_plain_english() {
    let reader = Reader::new();
    let mut found = Vec::new();
    for path in tracked() {
        let is_other = OTHERS.iter().any(|(other, _)| path.starts_with(other));
        let is_generated = path.starts_with("crates/containerd-api/src/");
        let source = || text(&path).unwrap_or_default();
        let has_texts = path.contains("/src/") && !NO_TEXTS.iter().any(|it| path.contains(it));
        let habits = if path.ends_with(".rs") && !is_generated {
            let source = source();
            let mut paragraphs = comments(&source);
            if has_texts && ["bench/", "crates/", "xtask/"].iter().any(|it| path.starts_with(it)) {
                paragraphs.extend(texts(&source));
            }
            reader.habits(&paragraphs)
        } else if path.starts_with("docs/performance/") && !path.ends_with("README.md") {
            // The benches make these pages from their texts, so a paragraph may be long.
            if path.ends_with(".md") { reader.habits(&paragraphs(&source())) } else { Vec::new() }
        } else if path.ends_with(".md") && !is_other {
            reader.page(&source())
        } else {
            Vec::new()
        };
        found.extend(habits.into_iter().map(|it| format!("{path}:{it}")));
    }
    assert!(found.is_empty(), "{} habits:\n{}", found.len(), found.join("\n"));
}

#[test]
fn each_habit_is_found() {
    let reader = Reader::new();
    let habits = |text: &str| {
        let found = reader.page(text).into_iter();
        found.map(|it| it.split(": ").nth(1).unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    for (sentence, habit) in [
        ("A note that nobody reads.", HABITS[0].0),
        ("Returns what is read.", HABITS[1].0),
        ("A hint for who asks.", HABITS[2].0),
        ("Answers with the digest.", HABITS[3].0),
        ("A mount of its own.", HABITS[4].0),
        ("The service is told.", HABITS[5].0),
        ("All bytes are here.", HABITS[6].0),
        ("Nothing is unmounted.", HABITS[7].0),
        ("The layer goes, too.", HABITS[8].0),
        ("The caller is to have it.", HABITS[9].0),
        ("It is.\n\n- Of the two.", "begins with Of"),
    ] {
        assert_eq!(habits(sentence), [habit], "{sentence}");
        let comment = sentence.replace("\n\n- ", " ").replace("\n", "\n/// ");
        let paragraphs = comments(&format!("/// {comment}\nfn f() {{}}"));
        assert_eq!(reader.habits(&paragraphs).len(), 1, "{sentence}");
        let message = sentence.replace("\n\n- ", " ");
        for code in [
            format!("#[error(\"{message}\")]"),
            format!("bail!(\n    \"{}\"\n)", message.replacen(' ', " \\\n     ", 1)),
            format!("let hint = r#\"\"{message}\"\"#;"),
        ] {
            assert_eq!(reader.habits(&texts(&code)).len(), 1, "{code}");
        }
    }
    assert_eq!(reader.page(&"word\n".repeat(MOST_LINES + 1)), ["1: a paragraph of 7 lines"]);
    let fine = "# Of\n\nOne sentence. **Another.** `Nobody` of five words. What is read?\n```\nOf\n```\n1. Item\n2. Item";
    assert_eq!(habits(fine), Vec::<String>::new());
    let code = "/// Fine.\n/// ```\n/// // Nobody\n/// ```\nlet a = \"// Nobody\";";
    assert_eq!(reader.habits(&comments(code)), Vec::<String>::new());
}
