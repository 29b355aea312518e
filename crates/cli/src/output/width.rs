//! The width of the terminal, and text that fits into it.

use std::os::fd::AsFd;

/// Columns of help texts without a terminal. Source: clap, `HelpTemplate::term_w`.
const OF_HELP: usize = 100;

/// Returns the number of columns if standard output is a terminal.
pub(crate) fn of_output() -> Option<usize> {
    of_terminal(std::io::stdout())
}

/// Returns the number of columns of help texts, as clap chooses it.
pub(crate) fn of_help() -> usize {
    let terminal = of_terminal(std::io::stdout())
        .or_else(|| of_terminal(std::io::stderr()))
        .or_else(|| of_terminal(std::io::stdin()));
    let variable = || std::env::var("COLUMNS").ok()?.parse().ok();
    terminal.or_else(variable).unwrap_or(OF_HELP)
}

fn of_terminal(file: impl AsFd) -> Option<usize> {
    let size = kernel::terminal::size(file.as_fd())?;
    Some(usize::from(size.ws_col)).filter(|it| *it > 0)
}

/// Characters of names and paths after which a line may end, the best ones first.
const MARKS: [&[char]; 3] = [&['/'], &[':', '@'], &['-', '.']];

/// Splits text into lines of at most `width` characters: at spaces, else after [`MARKS`].
pub(crate) fn wrap(text: &str, width: usize) -> Vec<&str> {
    let width = width.max(1);
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some((end, _)) = rest.char_indices().nth(width) {
        let fitting = rest.char_indices().take(width + 1);
        let space = fitting.filter(|(at, it)| *at > 0 && *it == ' ').last();
        let after = MARKS.iter().find_map(|it| rest[..end].rfind(*it));
        let (line, next) = match (space, after) {
            (Some((at, _)), _) => (&rest[..at], &rest[at + 1..]),
            (None, Some(at)) => rest.split_at(at + 1),
            (None, None) => rest.split_at(end),
        };
        lines.push(line);
        rest = next;
    }
    lines.push(rest);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_at_spaces_and_in_names() {
        let check = |text: &str, width, expect: &[&str]| assert_eq!(wrap(text, width), expect);
        check("", 5, &[""]);
        check("12345", 5, &["12345"]);
        check("12345 6", 5, &["12345", "6"]);
        check("1 2345 6", 5, &["1", "2345", "6"]);
        check("123456", 5, &["12345", "6"]);
        check("docker.io/library/debian:latest", 19, &["docker.io/library/", "debian:latest"]);
        check("docker.io/library/debian:latest", 13, &["docker.io/", "library/", "debian:latest"]);
        check("app:2026-11-29", 13, &["app:", "2026-11-29"]);
        check("2026-11-29", 8, &["2026-11-", "29"]);
        check("\u{e4}\u{f6}\u{fc}", 2, &["\u{e4}\u{f6}", "\u{fc}"]);
        check(" x", 1, &[" ", "x"]);
        check("ab", 0, &["a", "b"]);
    }
}
