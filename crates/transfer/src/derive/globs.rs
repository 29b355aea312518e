//! Globs that select paths, as in `.gitignore`.

use fast_glob::{glob_match, validate};
use image::tree::{Choice, Entry, Tree};

/// A glob, with its original text.
///
/// A glob without a slash, except at its end, matches names at any depth. Other globs match whole paths from the
/// root, with or without a leading slash. A glob with a slash at its end matches only directories. `*` and `?` match
/// any bytes except slashes, and `**` matches any number of directories. `[a-z]`, `[!a]` and `{a,b}` work as well,
/// and `\` quotes the next character.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    text: String,
    /// The pattern for `fast_glob`.
    pattern: String,
    /// Whether the glob ends with a slash.
    only_directories: bool,
}

/// Why a text is not a usable glob.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GlobError {
    #[error("\"{}\" is not a glob", .text.escape_debug())]
    Syntax { text: String, source: fast_glob::Error },
    /// The glob would be compared in too many ways.
    #[error("\"{}\" has too many alternatives in braces: use several globs", .0.escape_debug())]
    Alternatives(String),
    /// The glob is empty, or has only slashes.
    #[error("\"{}\" names only the root: write \"*\" for all files in it", .0.escape_debug())]
    Empty(String),
    /// A component is `.` or `..`, which paths of an image never contain.
    #[error("\"{}\" matches nothing: paths begin at the image's root and have no . or ..", .0.escape_debug())]
    Dots(String),
    /// The glob begins with `!`, which negates only in `.gitignore`.
    #[error(
        "\"{}\" begins with \"!\", which does not negate: use --include and --exclude, or write \"\\!\" for a \
         name that begins with it",
        .0.escape_debug()
    )]
    Negated(String),
}

impl std::str::FromStr for Glob {
    type Err = GlobError;

    fn from_str(text: &str) -> Result<Self, GlobError> {
        if text.starts_with('!') {
            return Err(GlobError::Negated(text.to_owned()));
        }
        let bare = text.strip_suffix('/').unwrap_or(text);
        let only_directories = bare.len() < text.len();
        let from_root = bare.strip_prefix("./").or_else(|| bare.strip_prefix('/'));
        let pattern = match from_root {
            Some(rest) => rest.to_owned(),
            None if bare.contains('/') => bare.to_owned(),
            None => format!("**/{bare}"),
        };
        if pattern.is_empty() || bare.is_empty() {
            return Err(GlobError::Empty(text.to_owned()));
        }
        if pattern.split('/').any(|name| [".", "..", ""].contains(&name)) {
            return Err(GlobError::Dots(text.to_owned()));
        }
        let text = text.to_owned();
        if alternatives(&pattern) > ALTERNATIVES_MAX {
            return Err(GlobError::Alternatives(text));
        }
        let pattern = plain_letters(&pattern);
        match validate(&pattern) {
            // `fast_glob` negates a pattern that begins with "!".
            Ok(()) if pattern.starts_with('!') => {
                Ok(Self { text, pattern: format!("\\{pattern}"), only_directories })
            }
            Ok(()) => Ok(Self { text, pattern, only_directories }),
            Err(source) => Err(GlobError::Syntax { text, source }),
        }
    }
}

/// Maximum number of patterns that a glob with braces stands for. `fast_glob` may try each of them for each path.
const ALTERNATIVES_MAX: u64 = 1024;

/// Returns at least the number of patterns without braces that a glob stands for.
fn alternatives(pattern: &str) -> u64 {
    let (mut product, mut open, mut chars) = (1_u64, Vec::new(), pattern.chars());
    while let Some(char) = chars.next() {
        match char {
            '\\' => drop(chars.next()),
            '{' => open.push(1_u64),
            ',' => open.iter_mut().for_each(|count| *count += 1),
            '}' => product = product.saturating_mul(open.pop().unwrap_or(1)),
            _ => {}
        }
    }
    // Braces that are not closed are an error elsewhere.
    open.into_iter().fold(product, u64::saturating_mul)
}

/// Removes backslashes before letters, which `fast_glob` would read as control characters: `\n` is the letter n here, as
/// in `.gitignore`.
fn plain_letters(pattern: &str) -> String {
    let (mut plain, mut chars) = (String::with_capacity(pattern.len()), pattern.chars());
    while let Some(char) = chars.next() {
        match char {
            '\\' => match chars.next() {
                Some(letter) if letter.is_ascii_alphabetic() => plain.push(letter),
                next => plain.extend(std::iter::once(char).chain(next)),
            },
            char => plain.push(char),
        }
    }
    plain
}

impl std::fmt::Display for Glob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Glob {
    /// Returns whether the glob matches a path without a leading slash.
    fn matches(&self, path: &[u8], is_directory: bool) -> bool {
        (is_directory || !self.only_directories) && glob_match(&self.pattern, path)
    }
}

/// Globs that select the part of an image to keep.
///
/// An `exclude` glob leaves out each match and all files below it. An `include` glob keeps each match that is not
/// excluded, all files below it, and the directories above it. Without `include` globs, all other files are kept.
#[derive(Debug, Clone)]
pub struct Globs {
    include: Vec<Glob>,
    exclude: Vec<Glob>,
}

impl Globs {
    #[must_use]
    pub const fn new(include: Vec<Glob>, exclude: Vec<Glob>) -> Self {
        Self { include, exclude }
    }

    pub(super) fn matcher(&self) -> Matcher<'_> {
        let count = self.include.len() + self.exclude.len();
        Matcher { globs: self, found: Vec::new(), matched: vec![false; count] }
    }
}

/// Matches paths against globs, and records which globs matched.
#[derive(Debug)]
pub(super) struct Matcher<'a> {
    globs: &'a Globs,
    found: Vec<usize>,
    matched: Vec<bool>,
}

impl Matcher<'_> {
    /// Decides whether a path is kept.
    pub(super) fn choose(&mut self, path: &[u8], entry: &Entry<'_>) -> Choice {
        let includes = self.globs.include.len();
        let (mut is_included, mut is_excluded) = (includes == 0, false);
        self.look(path, entry.inode.is_directory());
        for at in &self.found {
            match *at < includes {
                true => is_included = true,
                false => is_excluded = true,
            }
        }
        match (is_excluded, is_included) {
            (true, _) => Choice::Leave,
            (false, true) => Choice::Keep,
            (false, false) => Choice::Above,
        }
    }

    /// Finds the globs that match a path, and records them.
    fn look(&mut self, path: &[u8], is_directory: bool) {
        let path = path.strip_prefix(b"/").unwrap_or(path);
        let Globs { include, exclude } = self.globs;
        let all = include.iter().chain(exclude).enumerate();
        self.found.clear();
        self.found.extend(all.filter(|(_, it)| it.matches(path, is_directory)).map(|(at, _)| at));
        for at in &self.found {
            self.matched[*at] = true;
        }
    }

    /// Returns the globs that match no path of the whole tree, including paths that `choose` did not see.
    pub(super) fn unmatched(mut self, tree: &Tree) -> Vec<Glob> {
        let mut walk = tree.walk();
        while self.matched.contains(&false) {
            // Paths below an excluded directory were not passed to `choose`.
            let Some((path, entry)) = walk.next() else { break };
            self.look(path, entry.inode.is_directory());
        }
        let Globs { include, exclude } = self.globs;
        let all = include.iter().chain(exclude).zip(&self.matched);
        all.filter(|(_, matched)| !**matched).map(|(glob, _)| glob.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
