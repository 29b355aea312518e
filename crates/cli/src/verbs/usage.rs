//! Reports a command line that clap rejected, and prints help.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};

use crate::output::report;
use crate::session::failure::{FailureKind, FailureReport};
use crate::verbs::command_words::UnusedLine;
use crate::verbs::exit_codes::ExitCodes;
use crate::verbs::{help, podman_hints, row};

/// Prints the help or the version that clap was asked for, or else the error. `words` are those that clap parsed.
/// Returns the exit code.
pub(crate) fn report(error: clap::Error, words: Vec<OsString>) -> ExitCode {
    let (mut error, words) = escaped(error, words);
    let line = UnusedLine::new(words);
    if let Some(words) = line.without_help_of_help()
        && let Err(error) = crate::verbs::command().try_get_matches_from(&words)
    {
        return report(error, words);
    }
    let codes = line.verb().and_then(row).map_or(ExitCodes::Kinds, |it| it.exit_codes);
    let code = codes.usage();
    let is_json = line.read().has("json");
    if let Some(advice) = podman_hints::advice(&error, &line) {
        match is_json {
            true => FailureReport::usage(&advice, None, code).print(),
            false => report::error_line(&format!("quire: {advice}")),
        }
        return ExitCode::from(code);
    }
    use ErrorKind::{DisplayHelpOnMissingArgumentOrSubcommand, MissingSubcommand};
    if matches!(error.kind(), MissingSubcommand | DisplayHelpOnMissingArgumentOrSubcommand) {
        // clap counts set environment variables as arguments.
        match is_json {
            true => FailureReport::usage("no command is given", Some(LIST), code).print(),
            false => report::error_line(&help::short().to_string()),
        }
        return ExitCode::from(code);
    }
    if error.kind() == ErrorKind::UnknownArgument {
        // clap suggests `--` before the argument, which would make the argument the image's name.
        let _tip = error.remove(ContextKind::Suggested);
    }
    let mut error = help::explain(error, &line);
    podman_hints::whole_usage(&mut error, &line);
    podman_hints::blame_variable(&mut error, &line);
    if error.exit_code() != 0 {
        // The text has words of the command line, which may contain control characters, so it is printed without
        // clap's colors.
        let text = error.render().to_string();
        match is_json {
            true => {
                let (error, hint) = parts(&text);
                FailureReport::usage(&error, hint.as_deref(), code).print();
            }
            false => report::error_line(text.trim_end()),
        }
        return ExitCode::from(code);
    }
    match error.print() {
        Err(cause) if cause.kind() != std::io::ErrorKind::BrokenPipe => {
            report::error_line(&format!("quire: cannot write: {cause}"));
            ExitCode::from(FailureKind::from_error(&cause.into()).exit_code())
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Escapes control characters of the words in the error. clap drops sequences that begin with ESC, and prints newlines
/// as they are, so that a word could end with a line that looks like another error.
fn escaped(error: clap::Error, words: Vec<OsString>) -> (clap::Error, Vec<OsString>) {
    let plain = |word: &OsString| report::plain(&word.to_string_lossy()).into_owned().into();
    let escaped: Vec<OsString> = words.iter().map(plain).collect();
    if escaped == words {
        return (error, words);
    }
    match crate::verbs::command().try_get_matches_from(&escaped) {
        Err(same) if same.kind() == error.kind() => (same, escaped),
        _ => (error, words),
    }
}

/// The hint for a command line without a verb.
const LIST: &str = "`quire help` lists the commands";

/// Splits clap's text into the error, and the tips and the usage below it.
fn parts(text: &str) -> (String, Option<String>) {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let mut paragraphs = text.split("\n\n").map(|paragraph| {
        let lines: Vec<_> = paragraph.lines().map(str::trim).collect();
        lines.join(" ").trim().to_owned()
    });
    let error = paragraphs.next().unwrap_or_default();
    let hints = paragraphs.filter(|it| !it.is_empty() && !it.starts_with("For more information"));
    let hint = hints.collect::<Vec<_>>().join("\n");
    (error, (!hint.is_empty()).then_some(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_clap_have_an_error_and_a_hint() {
        let check = |text: &str, error: &str, hint: Option<&str>| {
            assert_eq!(parts(text), (error.to_owned(), hint.map(str::to_owned)), "{text}");
        };
        check(
            "error: required arguments were not provided:\n  <IMAGE>\n\nUsage: quire run <IMAGE>\n\n\
             For more information, try '--help'.\n",
            "required arguments were not provided: <IMAGE>",
            Some("Usage: quire run <IMAGE>"),
        );
        check(
            "error: invalid value 'x'\n  [possible values: a, b]\n\n  tip: 'a' exists\n\nFor more information\n",
            "invalid value 'x' [possible values: a, b]",
            Some("tip: 'a' exists"),
        );
        check("error: other\n", "other", None);
    }
}
