//! Turns sections of the documents into parts of man pages.

use clap_mangen::roff::{Inline, Roff, bold, roman};

/// Writes the section of a document below this heading, up to the next one.
pub(super) fn section(roff: &mut Roff, heading: &str, document: &str, part: &str) {
    roff.control("SH", [heading]);
    let lines = document.lines().skip_while(|it| *it != part).skip(1);
    let mut block: Option<Vec<&str>> = None;
    // A line of a table names its columns if this is false.
    let mut is_in_table = false;
    for line in lines {
        if let Some(mut code_lines) = block.take() {
            if line.starts_with("```") {
                code(roff, code_lines.into_iter());
            } else {
                code_lines.push(line);
                block = Some(code_lines);
            }
            continue;
        }
        if line.starts_with('#') {
            break;
        }
        if line.starts_with("```") {
            block = Some(Vec::new());
        } else if let Some(row) = line.strip_prefix("| ") {
            if is_in_table {
                table_row(roff, row);
            }
        } else if line.starts_with("|-") {
            is_in_table = true;
        } else if let Some(item) = line.strip_prefix("- ") {
            roff.control("IP", ["\\(bu", "2"]);
            roff.text(inlines(item));
        } else if line.is_empty() {
            is_in_table = false;
            roff.control("PP", []);
        } else {
            roff.text(inlines(line.trim_start()));
        }
    }
}

fn table_row(roff: &mut Roff, row: &str) {
    let mut cells = row.trim_end_matches(['|', ' ']).split(" | ");
    let title = cells.next().unwrap_or_default();
    roff.control("TP", []);
    roff.text(inlines(title));
    roff.text(inlines(&cells.collect::<Vec<_>>().join("; ")));
}

/// Writes lines as they are.
pub(super) fn code<'a>(roff: &mut Roff, lines: impl Iterator<Item = &'a str>) {
    roff.control("PP", []);
    roff.control("RS", ["4"]);
    roff.control("nf", []);
    for line in lines {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.control("RE", []);
}

/// Writes code in bold, and links as their text.
fn inlines(text: &str) -> Vec<Inline> {
    let mut found = Vec::new();
    for (at, part) in text.split('`').enumerate() {
        if at % 2 == 1 {
            found.push(bold(part));
        } else if !part.is_empty() {
            found.push(roman(without_links(&part.replace("**", ""))));
        }
    }
    found
}

fn without_links(text: &str) -> String {
    let mut rest = text;
    let mut plain = String::new();
    while let Some((before, link)) = rest.split_once("](")
        && let Some((before, shown)) = before.rsplit_once('[')
        && let Some((_, after)) = link.split_once(')')
    {
        plain += before;
        plain += shown;
        rest = after;
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_code_are_text() {
        assert_eq!(without_links("a [b](c.md#d), [x] and [e](f)"), "a b, [x] and e");
        assert_eq!(inlines("a `b` **c**"), [roman("a "), bold("b"), roman(" c")]);
    }

    #[test]
    fn a_section_ends_at_the_next_heading() {
        let mut roff = Roff::new();
        let text = "# A\nno\n## B\ntext\n\n| x | y |\n|---|---|\n| a | b |\n\n```toml\n# c\n```\n## D\nno\n";
        section(&mut roff, "PART", text, "## B");
        let text = roff.to_roff();
        let expect = [".SH PART", "text", ".TP", "a", "b", ".nf", "# c", ".fi"];
        let at: Vec<_> = expect.map(|it| text.lines().position(|line| line == it)).into();
        assert!(at.iter().all(Option::is_some) && at.is_sorted(), "{at:?} {text}");
        assert!(!text.contains("no"), "{text}");
    }
}
