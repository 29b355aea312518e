//! Plain English in the pages that people read, as CONTRIBUTING.md has it.

use std::collections::BTreeSet;

use super::{text, tracked};

/// Words of a sentence.
const MOST_WORDS: usize = 25;

/// Lines of a paragraph.
const MOST_LINES: usize = 6;

/// Words that make a reader ask who or what a sentence is about.
const BAD_STARTS: [&str; 7] = ["Nobody", "Of", "Somebody", "What", "Whatever", "Who", "Whoever"];

/// Pages that these limits are not for, with the reason.
const OTHERS: [(&str, &str); 2] = [
    ("docs/json.md", "made from the types of reports"),
    ("docs/performance/", "made by benches, but for the README"),
];

/// A paragraph, an item of a list, or a cell of a table.
#[derive(Debug, PartialEq, Eq)]
struct Paragraph {
    /// Number of its first line, from 1 on.
    line: usize,
    /// Number of its lines.
    lines: usize,
    /// Its words, with each code span as one word.
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
        let parts = paragraph.text.split('`').enumerate();
        let parts = parts.map(|(place, part)| if place % 2 == 0 { part } else { "Code" });
        paragraph.text = parts.collect();
    }
    all
}

/// The sentences of a text: one ends where a word ends with a stop and the next begins like a sentence.
fn sentences(text: &str) -> Vec<Vec<&str>> {
    let mut all = vec![Vec::new()];
    let mut has_ended = false;
    for word in text.split_whitespace() {
        let begins = word.starts_with(|it: char| it.is_uppercase() || "*\"(".contains(it));
        if has_ended && begins {
            all.push(Vec::new());
        }
        has_ended = word.trim_end_matches(['*', ')', '"']).ends_with(['.', '!', '?']);
        if word.contains(|it: char| it.is_alphanumeric())
            && let Some(last) = all.last_mut()
        {
            last.push(word);
        }
    }
    all
}

/// What is wrong with a page, by line.
fn wrong(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for paragraph in paragraphs(page) {
        let Paragraph { line, lines, text } = &paragraph;
        if *lines > MOST_LINES {
            found.push(format!("{line}: a paragraph of {lines} lines"));
        }
        for sentence in sentences(text) {
            let count = sentence.len();
            let start = sentence.iter().take(6).copied().collect::<Vec<_>>().join(" ");
            if count > MOST_WORDS {
                found.push(format!("{line}: a sentence of {count} words: {start} …"));
            }
            let is_question = sentence.last().is_some_and(|it| it.ends_with('?'));
            if !is_question && sentence.first().is_some_and(|it| BAD_STARTS.contains(it)) {
                found.push(format!("{line}: begins with \"{start} …\""));
            }
        }
    }
    found
}

#[test]
fn pages_are_in_plain_english() {
    let mut found = Vec::new();
    for path in tracked().into_iter().filter(|path| path.ends_with(".md")) {
        let is_other = OTHERS.iter().any(|(other, _)| path.starts_with(other));
        if !is_other || path == "docs/performance/README.md" {
            let page = text(&path).unwrap_or_default();
            found.extend(wrong(&page).into_iter().map(|it| format!("{path}:{it}")));
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn long_sentences_and_paragraphs_are_found() {
    let long = format!("{} word.", "word ".repeat(MOST_WORDS));
    let table = format!("| a | {long} |");
    let lines = "word\n".repeat(MOST_LINES + 1);
    assert_eq!(wrong(&long), ["1: a sentence of 26 words: word word word word word word …"]);
    assert_eq!(wrong(&table), ["1: a sentence of 26 words: word word word word word word …"]);
    assert_eq!(wrong(&lines), ["1: a paragraph of 7 lines"]);
    assert_eq!(wrong("It is.\n\n- Of the two."), ["3: begins with \"Of the two. …\""]);
    let fine = "# Of\n\nOne sentence. **Another.** `A third` of five words. Who asks?\n```\nOf\n```\n1. Item\n2. Item";
    assert_eq!(wrong(fine), Vec::<String>::new());
}

/// The rows of the threat model are only as true as the tests they name.
#[test]
fn the_threat_model_names_tests_that_are_there() {
    let all = tracked();
    let is_ours = |path: &&String| path.starts_with("crates/") && path.ends_with(".rs");
    let sources: String = all.iter().filter(is_ours).filter_map(|path| text(path)).collect();
    let model = text("docs/threat-model.md").unwrap();
    let rows = model.lines().filter_map(|line| line.strip_suffix(" |")?.rsplit_once('|'));
    let mut missing = BTreeSet::new();
    for name in rows.flat_map(|(_, last)| last.split('`').skip(1).step_by(2)) {
        let is_there = match name.split_once('*') {
            Some((start, _)) => all.iter().any(|path| path.starts_with(start)),
            None if name.contains('/') => all.iter().any(|path| path.starts_with(name)),
            None => {
                let last = name.trim_end_matches("::").rsplit("::").next().unwrap_or_default();
                let last = last.trim_end_matches('…');
                let target = format!("fuzz/fuzz_targets/{last}.rs");
                sources.contains(last) || all.contains(&target)
            }
        };
        if !is_there {
            missing.insert(name);
        }
    }
    assert_eq!(missing, BTreeSet::new());
}
