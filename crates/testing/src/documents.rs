//! Finds the commands in documents: code blocks, code spans, and the words of shell commands in them.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the repository's top folder.
///
/// # Panics
/// If this crate is not in `crates/testing`.
#[must_use]
pub fn repository() -> PathBuf {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    top.expect("this crate is crates/testing").to_owned()
}

/// A document of the repository.
#[derive(Debug)]
pub struct Page {
    /// Path in the repository.
    pub path: String,
    pub text: String,
}

/// Returns `README.md` and all documents below `docs`, sorted by path; empty if the tests run without the repository.
#[must_use]
pub fn pages() -> Vec<Page> {
    let mut folders = vec![PathBuf::from("docs")];
    let mut paths = vec![PathBuf::from("README.md")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(repository().join(&folder)).into_iter().flatten().flatten() {
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "md") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    let read = |path: PathBuf| {
        let text = fs::read_to_string(repository().join(&path)).ok()?;
        Some(Page { path: path.to_str()?.to_owned(), text })
    };
    paths.into_iter().filter_map(read).collect()
}

/// Returns the commands that messages of the programs print in backticks, each with its file. A value of a format
/// string becomes `X`; values named `option` or `options` are left out. Empty if the tests run without the
/// repository.
#[must_use]
pub fn commands_of_messages() -> Vec<(String, String)> {
    let mut folders = vec![PathBuf::from("crates")];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(repository().join(&folder)).into_iter().flatten().flatten() {
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                let is_test = path.ends_with("tests") || path.ends_with("testing");
                folders.extend((!is_test).then_some(path));
            } else if path.extension().is_some_and(|it| it == "rs") {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                let shown = path.display().to_string();
                found.extend(printed(&text).into_iter().map(|it| (shown.clone(), it)));
            }
        }
    }
    found.sort();
    found
}

/// Returns the commands in the strings of a source file.
fn printed(source: &str) -> Vec<String> {
    let code = source.lines().filter(|it| !it.trim_start().starts_with("//"));
    let code = code.collect::<Vec<_>>().join("\n");
    // A string can continue on the next line.
    let mut parts = code.split("\\\n");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str(part.trim_start());
    }
    let starts = text.match_indices("`quire ").map(|it| it.0 + 1);
    starts.filter_map(|at| text[at..].split_once('`').map(|it| filled(it.0))).collect()
}

/// Replaces each value of a format string in a command by [`X`](commands_of_messages).
fn filled(command: &str) -> String {
    let mut text = String::new();
    let mut rest = command;
    while let Some((before, after)) = rest.split_once('{') {
        let (value, behind) = after.split_once('}').unwrap_or((after, ""));
        text.push_str(before);
        text.push_str(if value.starts_with("option") { "" } else { "X" });
        rest = behind;
    }
    text + rest
}

/// A code block of a document.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    /// Number of the line with the opening fence, from 1.
    pub line: usize,
    /// Language after the opening fence: `sh`, `console`, `toml`; empty for none.
    pub language: String,
    /// Text between the fences.
    pub text: String,
}

impl Page {
    /// Returns the code blocks, in order.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut is_code = false;
        for (number, line) in self.text.lines().enumerate() {
            if let Some(language) = line.trim_start().strip_prefix("```") {
                is_code = !is_code;
                if is_code {
                    let language = language.trim().to_owned();
                    blocks.push(Block { line: number + 1, language, text: String::new() });
                }
            } else if let Some(block) = blocks.last_mut().filter(|_| is_code) {
                block.text += line;
                block.text += "\n";
            }
        }
        blocks
    }

    /// Returns the code spans outside of blocks, each with the number of its line.
    #[must_use]
    pub fn spans(&self) -> Vec<(usize, String)> {
        let mut spans = Vec::new();
        let mut is_code = false;
        for (number, line) in self.text.lines().enumerate() {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            if !is_code && !is_fence {
                let odd = line.split('`').skip(1).step_by(2);
                spans.extend(odd.map(|it| (number + 1, it.to_owned())));
            }
        }
        spans
    }
}

impl Block {
    /// Returns the commands of a block: all lines of `sh`, and the lines with a prompt of `console`. `None` for other
    /// languages.
    #[must_use]
    pub fn script(&self) -> Option<String> {
        match self.language.as_str() {
            "sh" => Some(self.text.clone()),
            "console" => {
                let lines = self.text.lines();
                let typed = lines.filter_map(|it| it.strip_prefix("# ").or(it.strip_prefix("$ ")));
                Some(typed.map(|it| format!("{it}\n")).collect())
            }
            _ => None,
        }
    }
}

/// Returns the words of each command of a shell script, including those after `sh -c` and in comments `# or:
/// COMMAND`. Quotes, redirections and `NAME=VALUE` before a command are removed; `$(…)` and other expansions are
/// unchanged.
#[must_use]
pub fn commands(script: &str) -> Vec<Vec<String>> {
    let mut reader = Reader::default();
    let mut rest = script.chars().peekable();
    while let Some(next) = rest.next() {
        match next {
            '\\' if rest.next_if_eq(&'\n').is_some() => {}
            '\\' => reader.word.get_or_insert_default().extend(rest.next()),
            '\'' | '"' => {
                let word = reader.word.get_or_insert_default();
                while let Some(inner) = rest.next_if(|it| *it != next) {
                    let is_escape = next == '"' && inner == '\\';
                    word.extend(if is_escape { rest.next() } else { Some(inner) });
                }
                rest.next();
            }
            '#' if reader.word.is_none() => {
                let mut comment = String::new();
                while let Some(inner) = rest.next_if(|it| *it != '\n') {
                    comment.push(inner);
                }
                if let Some(other) = comment.trim().strip_prefix("or: ") {
                    reader.others.extend(commands(other));
                }
            }
            '$' if rest.next_if_eq(&'(').is_some() => {
                let mut inner = String::new();
                while let Some(next) = rest.next_if(|it| *it != ')') {
                    inner.push(next);
                }
                rest.next();
                reader.word.get_or_insert_default().push_str(&format!("$({inner})"));
                reader.others.extend(commands(&inner));
            }
            '<' | '>' => {
                // The number of a descriptor belongs to the redirection.
                reader.word = reader.word.take().filter(|it| it.parse::<u8>().is_err());
                reader.end_word();
                while rest.next_if(|it| ['<', '>', '&'].contains(it)).is_some() {}
                reader.is_redirected = true;
            }
            '|' | '&' | ';' | '\n' | '(' | ')' => reader.end_command(),
            ' ' | '\t' => reader.end_word(),
            other => reader.word.get_or_insert_default().push(other),
        }
    }
    reader.end_command();
    reader.all.append(&mut reader.others);
    reader.all
}

#[derive(Default)]
struct Reader {
    all: Vec<Vec<String>>,
    others: Vec<Vec<String>>,
    command: Vec<String>,
    word: Option<String>,
    /// Whether the next word is the file of a redirection.
    is_redirected: bool,
}

impl Reader {
    fn end_word(&mut self) {
        let Some(word) = self.word.take() else { return };
        let name = word.split('=').next().unwrap_or_default();
        let is_setting = self.command.is_empty()
            && word.contains('=')
            && name.chars().all(|it| it == '_' || it.is_ascii_alphanumeric());
        if std::mem::take(&mut self.is_redirected) || is_setting {
            return;
        }
        if self.command.last().is_some_and(|it| it == "-c") {
            self.others.extend(commands(&word));
        }
        self.command.push(word);
    }

    fn end_command(&mut self) {
        self.end_word();
        if self.command.first().is_some_and(|it| it == "sudo") {
            self.command.remove(0);
        }
        if !self.command.is_empty() {
            self.all.push(std::mem::take(&mut self.command));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_strings_and_not_in_comments() {
        let source = "/// `quire no`\nlet a = \"see `quire ls {name}:/{path} \\\n     --json`, `quire du`\"; // `quire`\n";
        assert_eq!(printed(source), ["quire ls X:/X --json", "quire du"]);
        assert_eq!(filled("quire serve {options}x {0}"), "quire serve x X");
        let all = commands_of_messages();
        assert!(all.is_empty() || all.len() > 50, "{all:?}");
    }

    #[test]
    fn commands_are_split_as_a_shell_does() {
        let check = |script: &str, expected: &[&str]| {
            let all: Vec<_> = commands(script).iter().map(|it| it.join("|")).collect();
            assert_eq!(all, expected, "{script}");
        };
        check("a b   # c\nd", &["a|b", "d"]);
        check("a 'b c' \"d \\\" e\" f\\ g", &["a|b c|d \" e|f g"]);
        check("a && b; c | d & (e)", &["a", "b", "c", "d", "e"]);
        check("A=1 a <in >>out 2>&1 b", &["a|b"]);
        check("a \\\n  b", &["a|b"]);
        check("sudo a   # or: b c", &["a", "b|c"]);
        check("sh -c 'a b && exec c'", &["sh|-c|a b && exec c", "a|b", "exec|c"]);
        check("a \"$(b c)\" --d=$(e)", &["a|$(b c)|--d=$(e)", "e"]);
        check("a --b='c d' e#f", &["a|--b=c d|e#f"]);
    }

    #[test]
    fn blocks_and_spans_are_found() {
        let text =
            "`a` b\n```sh\nc `d`\n```\n  ```console\n# e\nsaid\n$ f\n  ```\n`g` `h`\n```\ni\n```\n";
        let page = Page { path: String::new(), text: text.to_owned() };
        let blocks = page.blocks();
        let scripts: Vec<_> = blocks.iter().map(|it| (it.line, it.script())).collect();
        let expected = [(2, Some("c `d`\n")), (5, Some("e\nf\n")), (11, None)];
        assert_eq!(scripts, expected.map(|(line, text)| (line, text.map(str::to_owned))));
        let spans: Vec<_> = page.spans().into_iter().map(|it| it.1).collect();
        assert_eq!(spans, ["a", "g", "h"]);
    }
}
