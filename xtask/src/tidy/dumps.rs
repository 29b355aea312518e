//! Compares the examples in `docs/format` with the files of `testdata` that they show.
//!
//! A block `hexdump FILE` has lines of an offset in hex, two spaces, and bytes in hex, followed by two spaces and a
//! description. `…` stands for omitted bytes. A block `text FILE` has whole lines of the file.

use std::fs;

use rig::process::repository;

/// An example: the line that opens its block, and the lines in it.
struct Example {
    /// `hexdump` or `text`.
    kind: String,
    /// Path of the file from the repository's root.
    file: String,
    lines: Vec<String>,
}

/// Returns the examples of a document that name a file.
fn examples(document: &str) -> Vec<Example> {
    let mut found = Vec::new();
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        let Some(info) = line.strip_prefix("```") else { continue };
        let lines = lines.by_ref().take_while(|it| *it != "```").map(str::to_owned).collect();
        if let Some((kind, file)) = info.split_once(' ') {
            found.push(Example { kind: kind.to_owned(), file: file.to_owned(), lines });
        }
    }
    found
}

/// Parses a line of a hexdump. Returns the offset and the bytes.
fn row(line: &str) -> Option<(usize, Vec<u8>)> {
    let (offset, rest) = line.split_once("  ")?;
    let bytes = rest.split("  ").next()?;
    let bytes: Result<_, _> = bytes.split(' ').map(|it| u8::from_str_radix(it, 16)).collect();
    Some((usize::from_str_radix(offset, 16).ok()?, bytes.ok()?))
}

/// Compares a hexdump with these bytes, and returns an error that describes the first difference.
fn check_hexdump(example: &Example, bytes: &[u8]) -> Result<(), String> {
    let mut next = 0;
    let mut is_gap = true;
    for line in &example.lines {
        if line == "…" {
            is_gap = true;
            continue;
        }
        let (offset, shown) = row(line).ok_or_else(|| format!("\"{line}\" has no bytes"))?;
        if offset != next && !is_gap || offset < next {
            return Err(format!("\"{line}\" follows byte {next:#x}"));
        }
        next = offset + shown.len();
        if bytes.get(offset..next) != Some(&*shown) {
            return Err(format!("\"{line}\" is not what the file has"));
        }
        is_gap = false;
    }
    Ok(())
}

fn check(example: &Example, bytes: &[u8]) -> Result<(), String> {
    match &*example.kind {
        "hexdump" => check_hexdump(example, bytes),
        "text" => {
            let text = String::from_utf8_lossy(bytes);
            let is_there = |wanted: &&String| !text.lines().any(|it| it == **wanted);
            match example.lines.iter().find(is_there) {
                Some(line) => Err(format!("the file has no line \"{line}\"")),
                None => Ok(()),
            }
        }
        kind => Err(format!("\"{kind}\" is no kind of example")),
    }
}

#[test]
fn examples_in_the_format_pages_are_what_files_have() {
    let mut checked = 0;
    for entry in fs::read_dir(repository().join("docs/format")).unwrap() {
        let path = entry.unwrap().path();
        for example in examples(&fs::read_to_string(&path).unwrap()) {
            let page = path.display();
            let bytes = fs::read(repository().join(&example.file))
                .unwrap_or_else(|error| panic!("{page}: {}: {error}", example.file));
            check(&example, &bytes).unwrap_or_else(|why| panic!("{page}: {}: {why}", example.file));
            checked += 1;
        }
    }
    assert!(checked > 3, "{checked} examples");
}

#[test]
fn a_wrong_example_is_found() {
    let check = |kind: &str, lines: &str| {
        let document = format!("```{kind} file\n{lines}\n```\n");
        check(&examples(&document)[0], b"ab\ncd\n").is_ok()
    };
    assert!(check("hexdump", "0000  61 62  letters\n0002  0a\n…\n0004  64  d"));
    assert!(!check("hexdump", "0000  61 63  letters"));
    assert!(!check("hexdump", "0000  61 62\n0003  63"), "a gap that is not shown");
    assert!(!check("hexdump", "0005  0a 00"), "beyond the end");
    assert!(!check("hexdump", "0000  letters"));
    assert!(check("text", "cd"));
    assert!(!check("text", "c"));
    assert!(!check("picture", "cd"));
}
