//! Tables for people.

use std::io::{self, Write};

use crate::output::report::plain;
use crate::output::width::{self, wrap};

/// Columns between two cells.
const GAP: usize = 2;

/// Maximum number of spaces after a cell. A longer cell of another row, whose text may be hostile, is not aligned.
const MOST_SPACES: usize = 1000;

/// A column is not made narrower than this for a narrow terminal.
const LEAST: usize = 12;

/// Prints rows in aligned columns. The columns with an index in `right` are aligned to the right. On a terminal that is
/// too narrow, long cells continue on the next line. If all titles are empty, there is no line of titles.
pub(crate) fn print(
    out: &mut dyn Write,
    head: &[&str],
    rows: &[Vec<String>],
    right: &[usize],
) -> io::Result<()> {
    print_within(width::of_output(), out, head, rows, right)
}

/// Prints a table as [`print()`] does, without line breaks in cells, because ids and digests are copied from it.
pub(crate) fn print_whole(
    out: &mut dyn Write,
    head: &[&str],
    rows: &[Vec<String>],
    right: &[usize],
) -> io::Result<()> {
    print_within(None, out, head, rows, right)
}

/// Prints the table into this number of columns, if there is a limit.
fn print_within(
    columns: Option<usize>,
    out: &mut dyn Write,
    head: &[&str],
    rows: &[Vec<String>],
    right: &[usize],
) -> io::Result<()> {
    // Cells may contain text from an image or a container.
    let rows: Vec<Vec<_>> =
        rows.iter().map(|row| row.iter().map(|it| plain(it).into_owned()).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> = (0..head.len()).map(width).collect();
    if let Some(columns) = columns {
        let least = |column: usize| match right.contains(&column) {
            true => widths[column],
            false => LEAST.max(head[column].chars().count()),
        };
        let least: Vec<_> = (0..head.len()).map(least).collect();
        narrow(&mut widths, &least, columns);
    }
    let head: Vec<String> = head.iter().map(|it| (*it).to_owned()).collect();
    let titles = head.iter().any(|it| !it.is_empty()).then_some(&head);
    for row in titles.into_iter().chain(&rows) {
        let cells = row.iter().zip(&widths).map(|(cell, width)| wrap(cell, *width));
        let cells: Vec<_> = cells.collect();
        for at in 0..cells.iter().map(Vec::len).max().unwrap_or(0) {
            let mut line = String::new();
            for (column, parts) in cells.iter().enumerate() {
                let part = parts.get(at).copied().unwrap_or_default();
                let space = (widths[column] - part.chars().count()).min(MOST_SPACES);
                let (before, after) = if right.contains(&column) { (space, 0) } else { (0, space) };
                line.extend(std::iter::repeat_n(' ', before));
                line.push_str(part);
                line.extend(std::iter::repeat_n(' ', after + GAP));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
    }
    Ok(())
}

/// Makes the widest columns narrower until the table fits into `columns`, or all columns have their least width.
fn narrow(widths: &mut [usize], least: &[usize], columns: usize) {
    let gaps = GAP * widths.len().saturating_sub(1);
    let mut total = widths.iter().sum::<usize>() + gaps;
    while total > columns {
        let wide = (0..widths.len()).filter(|it| widths[*it] > least[*it]);
        let Some(widest) = wide.max_by_key(|it| widths[*it]) else { return };
        widths[widest] -= 1;
        total -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(columns: Option<usize>, head: &[&str], row: &[&str], right: &[usize], expect: &str) {
        let mut out = Vec::new();
        let row = row.iter().map(|it| (*it).to_owned()).collect();
        print_within(columns, &mut out, head, &[row], right).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), expect);
    }

    #[test]
    fn cells_are_aligned_and_plain() {
        check(None, &["A", "B"], &["\x1b[2J", "x"], &[], "A          B\n\\u{1b}[2J  x\n");
        check(None, &["A", "SIZE"], &["x", "1"], &[1], "A  SIZE\nx     1\n");
        check(None, &["", ""], &["x", "1"], &[], "x  1\n");
    }

    #[test]
    fn one_long_cell_does_not_widen_each_row() {
        let row = |first: &str| vec![first.to_owned(), "x".to_owned()];
        let mut rows = vec![row("a"); 100];
        rows.push(row(&"b".repeat(1 << 20)));
        let mut out = Vec::new();
        print_within(None, &mut out, &["A", "B"], &rows, &[]).unwrap();
        assert!(out.len() < 2 << 20, "{}", out.len());
    }

    #[test]
    fn long_cells_continue_on_a_narrow_terminal() {
        let head = ["CONTAINER", "IMAGE", "STATUS", "CREATED", "COMMAND"];
        let image = "docker.io/library/debian:latest";
        let row = ["web", image, "running", "0 seconds ago", "sleep 1000"];
        check(
            Some(60),
            &head,
            &row,
            &[],
            "CONTAINER  IMAGE          STATUS   CREATED        COMMAND\n\
             web        docker.io/     running  0 seconds ago  sleep 1000\n\
             \x20          library/\n\
             \x20          debian:latest\n",
        );
        // A wide terminal changes nothing, and sizes stay whole.
        let whole = format!("NAME                                 SIZE\n{image}  1.50 MiB\n");
        check(Some(80), &["NAME", "SIZE"], &[image, "1.50 MiB"], &[1], &whole);
        check(
            Some(8),
            &["NAME", "SIZE"],
            &["registry:5000/x", "1.50 MiB"],
            &[1],
            "NAME              SIZE\nregistry:     1.50 MiB\n5000/x\n",
        );
    }
}
