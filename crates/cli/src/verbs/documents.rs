//! Tests that clap accepts the commands in documents and help texts.
//!
//! The test `documents` of the verbs runs them.

use std::ffi::OsString;

use clap::error::ErrorKind;
use testing::documents::{commands, commands_of_messages, pages};

use super::command;
use crate::verbs::VERBS;
use crate::verbs::groups::without_group;

/// Quotes in documents that look like commands of Quire: the page, their beginning, and their meaning.
const OTHERS: [(&str, &str, &str); 7] = [
    ("docs/composefs-tools.md", "quire composefs ", "read before clap is asked"),
    ("docs/format/erofs-profile.md", "quire disk ", "text whose digest is an id"),
    ("docs/format/erofs-profile.md", "quire partition ", "text whose digest is an id"),
    ("docs/format/erofs-profile.md", "quire signature ", "text whose digest is an id"),
    ("docs/format/erofs-profile.md", "quire esp ", "text whose digest is an id"),
    ("docs/format/erofs-profile.md", "quire verity ", "text whose digest is an id"),
    ("docs/format/erofs-profile.md", "quire salt ", "text whose digest is a salt"),
];

/// Words that stand for a verb, a command or more words.
const PLACEHOLDERS: [&str; 4] = ["…", "COMMAND", "VERB", "X"];

/// Returns clap's error for a command line, if there is one.
fn refused(words: &[String]) -> Option<clap::Error> {
    let words = words.iter().map(|it| it.replace('…', "...").replace("$(", "1.0 $("));
    let found = words.map(|it| it.split(" $(").next().unwrap_or_default().to_owned());
    let words: Vec<OsString> = found.map(OsString::from).collect();
    // Such as `image ls`.
    let words = without_group(&words).unwrap_or(words);
    let error = command().try_get_matches_from(words).err()?;
    (!matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion)).then_some(error)
}

/// Returns whether the words may be a part of a command line, or have a placeholder instead of a value.
fn is_part(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            | ErrorKind::InvalidValue
            | ErrorKind::ValueValidation
    )
}

/// Errors, hints and remarks name the next command: its verb, options and their combination must exist.
#[test]
fn commands_in_messages_are_no_others() {
    let mut found = Vec::new();
    for (path, text) in commands_of_messages() {
        for mut words in commands(&text) {
            words.retain(|it| !PLACEHOLDERS.contains(&it.as_str()));
            // A command of a shell inside a command, or only a placeholder.
            if words.first().is_none_or(|it| it != "quire") {
                continue;
            }
            let Some(error) = refused(&words).filter(|it| !is_part(it)) else { continue };
            found.push(format!("{path}: `{text}`: {error}"));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Commands in code blocks must be complete.
#[test]
fn commands_of_documents_are_command_lines() {
    let pages = pages();
    let mut found = Vec::new();
    let mut count = 0;
    for page in &pages {
        for block in page.blocks() {
            for words in commands(&block.script().unwrap_or_default()) {
                // `quire composefs` is read before clap.
                if words[0] != "quire" || words.get(1).is_some_and(|it| it == "composefs") {
                    continue;
                }
                count += 1;
                if let Some(error) = refused(&words) {
                    found.push(format!("{}:{}: {words:?}: {error}", page.path, block.line));
                }
            }
        }
    }
    assert!(pages.is_empty() || count > 60, "{count} commands");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Text quotes parts of commands, with placeholders in capitals. Verbs, options and their combinations must exist.
#[test]
fn commands_in_the_text_of_documents_are_no_others() {
    let mut found = Vec::new();
    let mut used = [false; OTHERS.len()];
    for page in &pages() {
        // Benchmarks generate these pages, with names of rows.
        let is_made = page.path.starts_with("docs/performance/");
        for (line, span) in page.spans().into_iter().filter(|_| !is_made) {
            let is_other = |it: &(&str, &str, &str)| page.path == it.0 && span.starts_with(it.1);
            if let Some(at) = OTHERS.iter().position(is_other) {
                used[at] = true;
                continue;
            }
            for mut words in commands(&span) {
                words.retain(|it| !PLACEHOLDERS.contains(&it.as_str()));
                // In some quotes, a placeholder is the only other word.
                if words.first().is_none_or(|it| it != "quire") || words.len() == 1 {
                    continue;
                }
                let Some(error) = refused(&words) else { continue };
                if !is_part(&error) {
                    found.push(format!("{}:{line}: `{span}`: {error}", page.path));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(pages().is_empty() || used == [true; OTHERS.len()], "remove from OTHERS: {used:?}");
}

#[test]
fn examples_are_command_lines() {
    for (verb, examples) in VERBS.iter().map(|it| (it.name, it.examples)) {
        let all = commands(examples);
        let own: Vec<_> = all.iter().filter(|words| words[0] == "quire").collect();
        assert!(own.iter().any(|words| words.iter().any(|it| it == verb)), "{verb}: {examples}");
        for words in own {
            let error = refused(words);
            assert!(error.is_none(), "{verb}: {words:?}: {}", error.expect("there is one"));
        }
    }
}
