//! `cargo xtask book`: builds the book from `docs`, with the help of each command, and checks its links.
//!
//! The pages stay in `docs` and beside it. The task copies them below `target/book/src`, and changes links that lead out of
//! `docs`, because a book has only the files of one directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use regex_lite::{Captures, Regex};

use rig::cache::{Cache, remove};
use rig::process::{quiet, repository, target_dir};
use rig::{Failed, tools};

use crate::install;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Take the help of commands from this binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// Pages beside `docs` that are chapters, with the title of each.
const PROJECT: [(&str, &str); 6] = [
    ("CHANGELOG.md", "Changelog"),
    ("SECURITY.md", "Reporting vulnerabilities"),
    ("MAINTAINERS.md", "Maintainers"),
    ("CONTRIBUTING.md", "Contributing"),
    ("ARCHITECTURE.md", "Architecture"),
    ("CODE_OF_CONDUCT.md", "Code of conduct"),
];

/// Chapters of SUMMARY.md that list all pages of a directory of `docs`.
const FOLDERS: [(&str, &str, &str); 2] = [
    ("Formats", "format", "Formats of files on disk, in registries and on sockets."),
    ("Decisions", "decisions", "Decisions on the design, with the reasons and the costs."),
];

pub(crate) fn run(args: &Args) -> Result<()> {
    let mdbook = tools::mdbook(&Cache::open()?)?;
    let binary = args.binary.clone().map_or_else(|| install::build(true), Ok)?;
    let top = target_dir()?.join("book");
    let source = top.join("src");
    for old in [&source, &top.join("html")] {
        remove(old)?;
    }
    copy_pages(&source)?;
    let commands = write_commands(&binary, &source)?;
    let summary = fs::read_to_string(source.join("SUMMARY.md"))?;
    fs::write(source.join("SUMMARY.md"), fill(&summary, &commands, &source)?)?;
    let settings = fs::read_to_string(repository().join("book.toml"))?;
    let settings = settings.replace("\"docs", "\"src").replace("target/book/", "");
    fs::write(top.join("book.toml"), settings)?;
    quiet(Command::new(mdbook).arg("build").arg(&top))?;
    let (pages, wrong) = check(&top.join("html"))?;
    if !wrong.is_empty() {
        bail!(Failed(format!("links that lead nowhere:\n{}", wrong.join("\n"))));
    }
    println!("{pages} pages in {}", top.join("html/index.html").display());
    Ok(())
}

/// Returns all files below a directory.
fn files(top: &Path) -> Result<Vec<PathBuf>> {
    let (mut all, mut folders) = (Vec::new(), vec![top.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { all.push(path) }
        }
    }
    all.sort();
    Ok(all)
}

/// Copies the pages and pictures of `docs`, and the pages beside it.
fn copy_pages(source: &Path) -> Result<()> {
    let mut paths: Vec<PathBuf> = PROJECT.iter().map(|it| it.0.into()).collect();
    for path in files(&repository().join("docs"))? {
        paths.push(path.strip_prefix(repository())?.to_owned());
    }
    for path in paths {
        let from = repository().join(&path);
        let to = source.join(staged(&path).with_context(|| path.display().to_string())?);
        fs::create_dir_all(to.parent().context("a page has a directory")?)?;
        if path.extension().is_some_and(|it| it == "md") {
            fs::write(to, with_links(&fs::read_to_string(from)?, &path))?;
        } else {
            fs::copy(from, to)?;
        }
    }
    Ok(())
}

/// Returns the path in the book of a file of the repository; `None` if the book lacks it.
fn staged(path: &Path) -> Option<PathBuf> {
    match path.strip_prefix("docs") {
        // mdbook calls a README `index.html`, but does not change links to it.
        Ok(inner) if inner.ends_with("README.md") => Some(inner.with_file_name("index.md")),
        Ok(inner) => Some(inner.to_owned()),
        Err(_) if path == Path::new("README.md") => Some("getting-started.md".into()),
        Err(_) => {
            let is_page = PROJECT.iter().any(|it| path == Path::new(it.0));
            is_page.then(|| Path::new("project").join(path))
        }
    }
}

/// Joins a link to the directory of its page, without `.` and `..`.
fn joined(page: &Path, link: &str) -> PathBuf {
    let mut all = page.parent().map(Path::to_owned).unwrap_or_default();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => drop(all.pop()),
            Component::CurDir => {}
            other => all.push(other),
        }
    }
    all
}

/// A link of Markdown that leads to a file: its text, target and fragment.
const LINK: &str = r"\[([^\[\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)";

/// Changes each line outside of code blocks.
fn outside_code(text: &str, mut change: impl FnMut(usize, &str) -> String) -> String {
    let mut is_code = false;
    let mut all = String::new();
    for (number, line) in text.lines().enumerate() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence {
            all += line;
        } else {
            all += &change(number + 1, line);
        }
        all.push('\n');
    }
    all
}

/// Whether a place of a line is in a code span.
fn in_span(line: &str, place: usize) -> bool {
    line.get(..place).is_some_and(|it| it.matches('`').count() % 2 == 1)
}

/// Changes the links of a page to those of the book. A link to a file that the book lacks becomes its text.
fn with_links(text: &str, page: &Path) -> String {
    let link = Regex::new(LINK).expect("LINK is valid");
    let here = staged(page).unwrap_or_default();
    let depth = here.components().count().saturating_sub(1);
    outside_code(text, |_, line| {
        let change = |found: &Captures<'_>| {
            let part = |at: usize| found.get(at).map_or("", |it| it.as_str());
            if in_span(line, found.get(0).map_or(0, |it| it.start())) {
                return part(0).to_owned();
            }
            // A directory is no page.
            let target = Some(joined(page, part(2))).filter(|it| repository().join(it).is_file());
            match target.as_deref().and_then(staged) {
                Some(target) => {
                    let up = "../".repeat(depth);
                    format!("[{}]({up}{}{})", part(1), target.display(), part(3))
                }
                _ => part(1).to_owned(),
            }
        };
        link.replace_all(line, change).into_owned()
    })
}

/// Writes a page for each command, and one with the list of all. Returns the names of the commands.
fn write_commands(binary: &Path, source: &Path) -> Result<Vec<String>> {
    let help = |words: &[&str]| quiet(Command::new(binary).args(words).env("COLUMNS", "100"));
    let all = help(&["--help"])?;
    let names: Vec<_> = commands(&all).map(str::to_owned).collect();
    let folder = source.join("commands");
    fs::create_dir_all(&folder)?;
    for name in &names {
        let page =
            format!("# quire {name}\n\n```text\n{}\n```\n", help(&["help", name])?.trim_end());
        fs::write(folder.join(format!("{name}.md")), page)?;
    }
    let page = format!(
        "# Commands\n\nThis is the output of `quire --help`. Each command has a page with the output of \
         `quire help COMMAND`.\n\n```text\n{}\n```\n",
        all.trim_end()
    );
    fs::write(source.join("commands.md"), page)?;
    Ok(names)
}

/// Returns the names of the commands in the output of `quire --help`.
fn commands(help: &str) -> impl Iterator<Item = &str> {
    let names = help.lines().filter_map(|line| {
        let (name, about) = line.strip_prefix("  ")?.split_once("  ")?;
        (!about.trim().is_empty()).then_some(name)
    });
    names.filter(|it| {
        let is_name = !it.is_empty() && it.bytes().all(|it| it.is_ascii_lowercase());
        is_name && *it != "help"
    })
}

/// Returns the title of a page, which is its first heading.
fn title(page: &Path) -> Result<String> {
    let text = fs::read_to_string(page)?;
    let title = text.lines().find_map(|it| it.strip_prefix("# "));
    Ok(title.with_context(|| format!("{} has no title", page.display()))?.to_owned())
}

/// Returns SUMMARY.md with all chapters: those that are empty links in the file, and the pages beside `docs`.
fn fill(summary: &str, commands: &[String], source: &Path) -> Result<String> {
    let item = |depth: usize, title: &str, path: &str| {
        format!("{}- [{title}]({path})\n", "  ".repeat(depth))
    };
    let pages = |folder: &str| -> Result<String> {
        let mut all = String::new();
        for path in files(&source.join(folder))? {
            let path = path.strip_prefix(source)?;
            if path.extension().is_some_and(|it| it == "md") && !path.ends_with("index.md") {
                all += &item(1, &title(&source.join(path))?, &path.display().to_string());
            }
        }
        Ok(all)
    };
    let mut text = format!("{}\n", summary.trim_end());
    let list = item(0, "Commands", "commands.md");
    let each =
        commands.iter().map(|it| item(1, &format!("quire {it}"), &format!("commands/{it}.md")));
    text = replaced(&text, "- [Commands]()\n", &(list + &each.collect::<String>()))?;
    for (chapter, folder, about) in FOLDERS {
        let page = format!("{folder}.md");
        let inner = pages(folder)?;
        fs::write(
            source.join(&page),
            format!("# {chapter}\n\n{about}\n\n{}", inner.replace("  - ", "- ")),
        )?;
        text = replaced(&text, &format!("- [{chapter}]()\n"), &(item(0, chapter, &page) + &inner))?;
    }
    let figures = item(0, "Figures", "performance/index.md");
    text = replaced(&text, &figures, &(figures.clone() + &pages("performance")?))?;
    text += "\n# The project\n\n";
    text.extend(PROJECT.map(|(path, title)| item(0, title, &format!("project/{path}"))));
    Ok(text)
}

fn replaced(text: &str, old: &str, new: &str) -> Result<String> {
    if !text.contains(old) {
        bail!("docs/SUMMARY.md lacks the line {}", old.trim_end());
    }
    Ok(text.replacen(old, new, 1))
}

/// Checks each link of the built book, and returns the number of pages and the wrong links.
fn check(html: &Path) -> Result<(usize, Vec<String>)> {
    let link = Regex::new(r#"(?:href|src)="([^"]*)""#).expect("the pattern is valid");
    let id = Regex::new(r#"\bid="([^"]*)""#).expect("the pattern is valid");
    let mut pages = BTreeMap::new();
    for path in files(html)? {
        let is_page = path.extension().is_some_and(|it| it == "html");
        let text = if is_page { fs::read_to_string(&path)? } else { String::new() };
        let ids: BTreeSet<_> = id.captures_iter(&text).map(|it| it[1].to_owned()).collect();
        pages.insert(path.strip_prefix(html)?.to_owned(), (text, ids));
    }
    let mut wrong = Vec::new();
    for (page, (text, _)) in &pages {
        // The paths of this page begin at the top of the web site.
        if page == Path::new("404.html") {
            continue;
        }
        for found in link.captures_iter(text) {
            let target = found[1].replace("&amp;", "&");
            if target.is_empty() || target.contains(':') {
                continue;
            }
            let (path, fragment) = target.split_once('#').unwrap_or((&target, ""));
            let path = if path.is_empty() { page.clone() } else { joined(page, path) };
            let is_sound = match pages.get(&path) {
                Some((_, ids)) => fragment.is_empty() || ids.contains(fragment),
                None => false,
            };
            if !is_sound {
                wrong.push(format!("{}: {target}", page.display()));
            }
        }
    }
    let count = pages.keys().filter(|it| it.extension().is_some_and(|it| it == "html")).count();
    Ok((count, wrong))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tracked;

    /// Returns the fragments of a page's headings, as forges make them.
    fn fragments(text: &str) -> BTreeSet<String> {
        let mut all = BTreeSet::new();
        outside_code(text, |_, line| {
            if let Some(heading) = line.strip_prefix('#') {
                let heading = heading.trim_start_matches('#').trim().to_lowercase();
                let kept = heading.chars().filter(|it| it.is_alphanumeric() || " -_".contains(*it));
                all.insert(kept.collect::<String>().replace(' ', "-"));
            }
            String::new()
        });
        all
    }

    /// The same links lead somewhere on a forge, where pages are read without the book.
    #[test]
    fn links_lead_to_files_and_headings() {
        let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
        let pages: Vec<_> = tracked().into_iter().filter(|it| it.ends_with(".md")).collect();
        let mut wrong = Vec::new();
        let mut count = 0;
        for page in pages.iter().filter(|it| *it != "docs/SUMMARY.md") {
            let text = fs::read_to_string(repository().join(page)).unwrap();
            outside_code(&text, |number, line| {
                for found in link.captures_iter(line) {
                    let target = &found[1];
                    if target.contains(':') || in_span(line, found.get(0).unwrap().start()) {
                        continue;
                    }
                    count += 1;
                    let (path, fragment) = target.split_once('#').unwrap_or((target, ""));
                    let path = match path {
                        "" => PathBuf::from(page),
                        path => joined(Path::new(page), path),
                    };
                    let there = repository().join(&path);
                    let is_sound = there.exists()
                        && (fragment.is_empty()
                            || fragments(&fs::read_to_string(there).unwrap()).contains(fragment));
                    if !is_sound {
                        wrong.push(format!("{page}:{number}: {target}"));
                    }
                }
                String::new()
            });
        }
        assert!(count > 100, "{count} links");
        assert_eq!(wrong, Vec::<String>::new());
    }

    #[test]
    fn every_page_is_a_chapter() {
        let docs = repository().join("docs");
        let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
        let listed = ["decisions/", "format/", "performance/", "SUMMARY.md"];
        let mut missing = Vec::new();
        for path in files(&docs).unwrap() {
            let path = path.strip_prefix(&docs).unwrap().display().to_string();
            let is_listed = listed.iter().any(|it| path.starts_with(it));
            if path.ends_with(".md") && !is_listed && !summary.contains(&format!("({path})")) {
                missing.push(path);
            }
        }
        assert_eq!(missing, Vec::<String>::new());
        for (chapter, _, _) in FOLDERS {
            assert!(summary.contains(&format!("- [{chapter}]()\n")), "{chapter}");
        }
    }

    #[test]
    fn links_are_those_of_the_book() {
        let check = |page: &str, text: &str, expected: &str| {
            assert_eq!(with_links(text, Path::new(page)), format!("{expected}\n"));
        };
        check("docs/lazy.md", "[a](engines.md#b) [c](../dist/systemd)", "[a](engines.md#b) c");
        check("docs/engines/k3s.md", "[a](../lazy.md)", "[a](../lazy.md)");
        check("CONTRIBUTING.md", "[a](docs/lazy.md) [b](#c)", "[a](../lazy.md) [b](#c)");
        check("docs/security.md", "[a](../SECURITY.md)", "[a](project/SECURITY.md)");
        check(
            "docs/lazy.md",
            "`[a](no.md)`\n```\n[a](no.md)\n```",
            "`[a](no.md)`\n```\n[a](no.md)\n```",
        );
        check("docs/lazy.md", "[a](https://b.example/c)", "[a](https://b.example/c)");
    }

    #[test]
    fn commands_are_found_in_help() {
        let help = "About.\n\nImages:\n  import       Import\n  show         Show [alias: inspect]\n  help         Help\n\n\
                    Options:\n      --store <DIR>\n  -h, --help\n          Print help\n  -V, --version  Print\n";
        assert_eq!(commands(help).collect::<Vec<_>>(), ["import", "show"]);
    }
}
