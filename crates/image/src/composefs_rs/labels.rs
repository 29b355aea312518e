//! SELinux labels, as an image's own policy assigns them to paths. Source: selabel_file(5).

use std::collections::HashMap;

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};

use crate::erofs::read::PATH_MAX;

/// Maximum length in bytes of a file of a policy. Fedora's longest one has 0.5 MiB.
pub const POLICY_MAX: u64 = 8 << 20;

/// Maximum size in bytes of the automaton of all patterns, and of the states that are kept. The automaton of Fedora's
/// policy takes about 10 MiB.
const NFA_MAX: usize = 48 << 20;
const STATES_MAX: usize = 32 << 20;
/// How often the states may be dropped before a policy is refused. This bounds the time that a hostile policy takes.
const DROPS_MAX: usize = 100;
/// Maximum number of patterns. Policies of distributions have some thousands.
const PATTERNS_MAX: usize = 100_000;

/// The reason why the labels of a policy are unknown.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    /// A file of the policy is not UTF-8.
    #[error("a file of the SELinux policy is not UTF-8, and composefs-rs refuses such images")]
    NotUtf8,
    /// A line of the policy is invalid.
    #[error("the SELinux policy has the line \"{}\", which composefs-rs refuses", .0.escape_debug())]
    Line(String),
    /// A pattern needs a feature that only PCRE2 has, such as a look-around.
    #[error(
        "the SELinux policy has the pattern \"{}\", which needs PCRE2: use composefs-rs for the id of this image",
        .0.escape_debug()
    )]
    Pattern(String),
    /// The patterns take too much memory or time.
    #[error("the patterns of the SELinux policy are too large")]
    TooLarge,
    /// The caller wanted to stop.
    #[error("cancelled")]
    Stopped,
    /// `SELINUXTYPE` is not a file name.
    #[error("/etc/selinux/config has the type \"{}\", which is not a file name", .0.escape_debug())]
    Name(String),
}

/// The files of a policy.
#[derive(Debug, Default)]
pub struct PolicyText {
    /// `file_contexts`, then those of `file_contexts.local` and `file_contexts.homedirs` that exist.
    pub contexts: Vec<Vec<u8>>,
    /// Those of `file_contexts.subs` and `file_contexts.subs_dist` that exist.
    pub substitutions: Vec<Vec<u8>>,
}

/// A policy, which assigns labels to paths.
pub struct LabelPolicy {
    automaton: DFA,
    states: Cache,
    /// The label of each pattern. The first pattern that matches decides.
    label_of: Vec<Option<u32>>,
    labels: Vec<Vec<u8>>,
    substitutes: HashMap<Vec<u8>, Vec<u8>>,
}

impl std::fmt::Debug for LabelPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LabelPolicy")
            .field("patterns", &self.label_of.len())
            .finish_non_exhaustive()
    }
}

/// Returns the name of the policy that `/etc/selinux/config` chooses. Rule B2.
///
/// # Errors
/// [`LabelError`] if the file is not UTF-8, or the name cannot be that of a directory.
pub fn policy_name(config: &[u8]) -> Result<Option<String>, LabelError> {
    for line in text(config)?.lines() {
        if let Some((key, value)) = line.split_once('=')
            && key.trim().eq_ignore_ascii_case("SELINUXTYPE")
        {
            let name = value.trim();
            if name.is_empty() || name.split('/').any(|it| matches!(it, "." | "..")) {
                return Err(LabelError::Name(name.to_owned()));
            }
            return Ok(Some(name.to_owned()));
        }
    }
    Ok(None)
}

fn text(bytes: &[u8]) -> Result<&str, LabelError> {
    std::str::from_utf8(bytes).map_err(|_error| LabelError::NotUtf8)
}

impl LabelPolicy {
    /// Parses a policy. Rule B3.
    ///
    /// # Errors
    /// [`LabelError`] if a line is invalid, or a pattern cannot be matched.
    pub fn parse(files: &PolicyText) -> Result<Self, LabelError> {
        let mut patterns = Vec::new();
        let mut labels = Vec::new();
        let mut numbers = HashMap::new();
        let mut label_of = Vec::new();
        for file in &files.contexts {
            for line in text(file)?.lines() {
                let wrong = || LabelError::Line(line.chars().take(200).collect());
                let mut words = line.split_whitespace();
                let Some(pattern) = words.next().filter(|it| !it.starts_with('#')) else {
                    continue;
                };
                let next = words.next().ok_or_else(wrong)?;
                let (letter, label) = match next.strip_prefix('-') {
                    Some(letter @ ("b" | "c" | "d" | "p" | "l" | "s" | "-")) => {
                        (letter, words.next().ok_or_else(wrong)?)
                    }
                    Some(_) => return Err(wrong()),
                    None => (".", next),
                };
                if words.next().is_some() {
                    return Err(wrong());
                }
                if patterns.len() == PATTERNS_MAX {
                    return Err(LabelError::TooLarge);
                }
                patterns.push(format!("^({pattern}){letter}$"));
                label_of.push(if label == "<<none>>" {
                    None
                } else {
                    let new = u32::try_from(labels.len()).map_err(|_many| LabelError::TooLarge)?;
                    Some(*numbers.entry(label).or_insert_with(|| {
                        labels.push(label.as_bytes().to_vec());
                        new
                    }))
                });
            }
        }
        let mut substitutes = HashMap::new();
        for file in &files.substitutions {
            for line in text(file)?.lines() {
                let wrong = || LabelError::Line(line.chars().take(200).collect());
                let mut words = line.split_whitespace();
                let Some(from) = words.next().filter(|it| !it.starts_with('#')) else {
                    continue;
                };
                let to = words.next().ok_or_else(wrong)?;
                if words.next().is_some() {
                    return Err(wrong());
                }
                // Each path below `from` is changed, so a long target would take much time.
                if to.len() > PATH_MAX {
                    return Err(LabelError::TooLarge);
                }
                substitutes.insert(from.as_bytes().to_vec(), to.as_bytes().to_vec());
            }
        }
        // The last line that matches a path decides.
        patterns.reverse();
        label_of.reverse();
        let automaton = automaton(&patterns)?;
        let states = automaton.create_cache();
        Ok(Self { automaton, states, label_of, labels, substitutes })
    }

    /// Returns the values of all labels.
    pub(super) fn labels(&self) -> &[Vec<u8>] {
        &self.labels
    }

    /// Returns the path in whose place the policy considers `path`.
    pub(super) fn substitute(&self, path: &[u8]) -> Option<&[u8]> {
        self.substitutes.get(path).map(Vec::as_slice)
    }

    /// Returns the number of the label of a path, for files of the type with this letter.
    pub(super) fn label(&mut self, path: &[u8], letter: u8) -> Result<Option<u32>, LabelError> {
        let key = [path, &[letter]].concat();
        let input = Input::new(&key).anchored(Anchored::Yes);
        let found = self.automaton.try_search_fwd(&mut self.states, &input);
        let found = found.map_err(|_gave_up| LabelError::TooLarge)?;
        Ok(found.and_then(|it| self.label_of.get(it.pattern().as_usize()).copied().flatten()))
    }
}

/// The meaning of patterns is the same as in composefs-rs: bytes, and a dot matches all bytes but NUL.
fn syntax_of_patterns() -> syntax::Config {
    syntax::Config::new().unicode(false).utf8(false).line_terminator(0)
}

fn automaton(patterns: &[String]) -> Result<DFA, LabelError> {
    let states = DFA::config()
        .cache_capacity(STATES_MAX)
        .skip_cache_capacity_check(true)
        .minimum_cache_clear_count(Some(DROPS_MAX));
    let built = DFA::builder()
        .syntax(syntax_of_patterns())
        .thompson(thompson::Config::new().nfa_size_limit(Some(NFA_MAX)))
        .configure(states)
        .build_many(patterns);
    built.map_err(|_error| {
        let is_wrong =
            |it: &&String| syntax::parse_with(it.as_str(), &syntax_of_patterns()).is_err();
        match patterns.iter().find(is_wrong) {
            Some(pattern) => LabelError::Pattern(pattern.chars().take(200).collect()),
            None => LabelError::TooLarge,
        }
    })
}
