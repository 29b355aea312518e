//! Reads a command line word by word, also one that is incomplete or that clap rejects.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};

/// The words of a command line, as far as they belong to Quire. The rest is the command line of a program in a
/// container.
#[derive(Debug)]
pub(crate) struct CommandWords<'a> {
    /// The verb's command, or the program's if there is no verb.
    pub(crate) command: &'a Command,
    /// The verb's name, and the number of its word.
    pub(crate) verb: Option<(&'a str, usize)>,
    /// Whether the verb does not exist.
    pub(crate) is_unknown: bool,
    /// Number of positional arguments of the verb.
    pub(crate) place: usize,
    /// The option whose value is the next word.
    pub(crate) awaited: Option<&'a Arg>,
    /// Whether the next word may be an option.
    pub(crate) has_options: bool,
    options: Vec<(&'a Arg, Option<String>)>,
    /// Number of the first word that belongs to the program in the container.
    end: Option<usize>,
}

impl<'a> CommandWords<'a> {
    /// Reads the words that follow the name of the program. The verb's options must have been built.
    pub(crate) fn read<T: AsRef<str>>(program: &'a Command, words: &[T]) -> Self {
        let mut read = Self {
            command: program,
            verb: None,
            is_unknown: false,
            place: 0,
            awaited: None,
            has_options: true,
            options: Vec::new(),
            end: None,
        };
        for (at, word) in words.iter().enumerate() {
            read.take(word.as_ref(), at);
        }
        read
    }

    fn take(&mut self, word: &str, at: usize) {
        if self.awaited.take().is_some() {
            if let Some((_, value)) = self.options.last_mut() {
                *value = Some(word.to_owned());
            }
        } else if self.has_options && word == "--" {
            self.has_options = false;
        } else if self.has_options && word.starts_with("--") {
            self.take_long(word);
        } else if self.has_options && word.starts_with('-') && word.len() > 1 {
            self.take_letters(word);
        } else if self.command.has_subcommands() && !self.is_unknown {
            match self.command.find_subcommand(word) {
                Some(verb) => {
                    // The verbs below `help` are not called.
                    self.verb = self.verb.or(Some((verb.get_name(), at)));
                    self.command = verb;
                }
                None => self.is_unknown = true,
            }
        } else {
            self.place += 1;
            if self.has_options
                && let Some(next) = positional(self.command, self.place)
                && next.is_trailing_var_arg_set()
            {
                self.has_options = false;
                self.end = Some(at + 1);
            }
        }
    }

    fn take_long(&mut self, word: &str) {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word, None),
        };
        let Some(option) = find(self.command, name) else { return };
        let awaits = value.is_none() && takes_value(option) && !option.is_require_equals_set();
        self.awaited = awaits.then_some(option);
        self.options.push((option, value));
    }

    /// Reads options such as `-it`: the first that takes a value takes the rest of the word.
    fn take_letters(&mut self, word: &str) {
        for (at, letter) in word.char_indices().skip(1) {
            let Some(option) = find(self.command, &format!("-{letter}")) else { return };
            let rest = word.get(at + letter.len_utf8()..).unwrap_or_default();
            if !takes_value(option) {
                self.options.push((option, None));
                continue;
            }
            let awaits = rest.is_empty() && !option.is_require_equals_set();
            self.awaited = awaits.then_some(option);
            self.options.push((option, (!rest.is_empty()).then(|| rest.to_owned())));
            return;
        }
    }

    /// Returns whether the option with this long name is given.
    pub(crate) fn has(&self, long: &str) -> bool {
        self.options.iter().any(|(option, _)| option.get_long() == Some(long))
    }

    /// Returns the value of the option with this long name.
    pub(crate) fn value(&self, long: &str) -> Option<&str> {
        let given = self.options.iter().rfind(|(option, _)| option.get_long() == Some(long));
        given.and_then(|(_, value)| value.as_deref())
    }
}

/// A command line that clap rejected, or that asks for help.
#[derive(Debug)]
pub(crate) struct UnusedLine {
    words: Vec<OsString>,
    texts: Vec<String>,
    program: Command,
}

impl UnusedLine {
    /// `words` are those that clap has parsed, with the name of the program.
    pub(crate) fn new(words: Vec<OsString>) -> Self {
        let texts = words.iter().skip(1).map(|it| it.to_string_lossy().into_owned()).collect();
        let mut program = crate::verbs::command();
        program.build();
        Self { words, texts, program }
    }

    pub(crate) fn read(&self) -> CommandWords<'_> {
        CommandWords::read(&self.program, &self.texts)
    }

    pub(crate) fn verb(&self) -> Option<&str> {
        self.read().verb.map(|(name, _)| name)
    }

    /// Returns all words, with the name of the program.
    pub(crate) fn words(&self) -> &[OsString] {
        &self.words
    }

    /// Returns the last option and the value of a word such as `-itd=true`, whose options take no values.
    pub(crate) fn letters_with_value(&self) -> Option<(String, String)> {
        let read = self.read();
        let end = read.end.unwrap_or(self.texts.len());
        self.texts.iter().take(end).find_map(|word| {
            let (letters, value) = word.strip_prefix('-')?.split_once('=')?;
            let options = letters.chars().map(|it| format!("-{it}"));
            let is_switch = |it: String| find(read.command, &it).is_some_and(|it| !takes_value(it));
            let last = letters.chars().last()?;
            options.into_iter().all(is_switch).then(|| (format!("-{last}"), value.to_owned()))
        })
    }

    /// Whether `-h` asks for the help of the program, because it comes before the verb or there is none.
    pub(crate) fn asks_for_list(&self) -> bool {
        let before = self.read().verb.map_or(self.texts.len(), |(_, at)| at);
        self.texts.iter().take(before).any(|it| it == "-h")
    }

    /// Returns the words without the options `-h` and `--help` of the verb `help`, which clap refuses. `help -h` becomes
    /// `help help`. `None` if the line has no such option.
    pub(crate) fn without_help_of_help(&self) -> Option<Vec<OsString>> {
        let (_, at) = self.read().verb.filter(|(name, _)| *name == "help")?;
        // `words` begins with the name of the program.
        let (before, after) = self.words.split_at_checked(at + 2)?;
        let is_option = |it: &&OsString| *it == "-h" || *it == "--help";
        let names: Vec<_> = after.iter().filter(|it| !is_option(it)).cloned().collect();
        if names.len() == after.len() {
            return None;
        }
        let help = OsString::from("help");
        let names = if names.is_empty() { vec![help] } else { names };
        Some(before.iter().cloned().chain(names).collect())
    }

    /// Returns the verb if the line ends with `-h`, which this verb has as an option with a value.
    pub(crate) fn asks_with_option(&self) -> Option<&str> {
        let read = self.read();
        let is_asked = read.place == 0
            && self.texts.last().is_some_and(|it| it == "-h")
            && read.awaited.is_some_and(|it| it.get_short() == Some('h'));
        read.verb.filter(|_| is_asked).map(|(name, _)| name)
    }
}

/// Puts `--` after the image or the container if an option follows it, because this option belongs to the program in
/// the container, as in podman and Docker. clap takes Quire's options there. Returns `None` if nothing has to change.
/// `words` is the whole command line, and `program` has the options of its verb.
pub(crate) fn end_options(program: &Command, words: &[OsString]) -> Option<Vec<OsString>> {
    let (name, rest) = words.split_first()?;
    let texts: Vec<_> = rest.iter().map(|it| it.to_string_lossy()).collect();
    let read = CommandWords::read(program, &texts);
    let end = read.end?;
    let next = texts.get(end)?;
    if !next.starts_with('-') || next == "--" {
        return None;
    }
    let (before, after) = rest.split_at(end);
    let words = std::iter::once(name).chain(before);
    Some(words.cloned().chain([OsString::from("--")]).chain(after.iter().cloned()).collect())
}

/// Returns the positional argument at this place.
pub(crate) fn positional(command: &Command, place: usize) -> Option<&Arg> {
    let takes_many = |it: &&&Arg| it.get_num_args().is_some_and(|it| it.max_values() > 1);
    let all: Vec<_> = command.get_positionals().filter(|it| !it.is_hide_set()).collect();
    all.get(place).or_else(|| all.iter().rfind(takes_many)).copied()
}

/// Returns the option of this name, with its hyphens.
pub(crate) fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|it| match name.strip_prefix("--") {
        Some(long) => {
            it.get_long() == Some(long) || it.get_all_aliases().is_some_and(|it| it.contains(&long))
        }
        None => {
            let mut short = name.strip_prefix('-').unwrap_or_default().chars();
            it.get_short().is_some() && it.get_short() == short.next() && short.next().is_none()
        }
    })
}

fn takes_value(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::Set | ArgAction::Append)
}

#[cfg(all(test, feature = "serve"))]
mod tests {
    use super::*;

    fn check<T: PartialEq + std::fmt::Debug>(
        line: &str,
        expect: &T,
        found: fn(&CommandWords<'_>) -> T,
    ) {
        let mut command = crate::verbs::command();
        command.build();
        let words: Vec<_> = line.split(' ').collect();
        assert_eq!(&found(&CommandWords::read(&command, &words)), expect, "{line}");
    }

    #[test]
    fn options_of_contained_programs_are_not_ours() {
        for (line, is_ours) in [
            ("--json", true),
            ("--json run --bogus", true),
            ("run --bogus --json a", true),
            ("history --json a", true),
            ("cp -a --json a", true),
            ("run a prog --json", false),
            ("run a --json", false),
            ("run -- a --json", false),
            ("run --name --json a", false),
            ("exec -it a prog --json", false),
            ("exec --json a prog", true),
            ("exec a --json prog", false),
        ] {
            check(line, &is_ours, |it| it.has("json"));
        }
    }

    #[test]
    fn values_are_those_of_options() {
        for (line, expect) in [
            ("run ", None),
            ("--store /a run ", Some("/a")),
            ("run --store=/b ", Some("/b")),
            ("run a prog --store /b", None),
            ("tag --store", None),
            ("run -v a:b --store /c", Some("/c")),
        ] {
            check(line, &expect.map(str::to_owned), |it| it.value("store").map(str::to_owned));
        }
        let name = |it: &CommandWords<'_>| it.value("workdir").map(str::to_owned);
        check("run -itw/a b", &Some("/a".to_owned()), name);
        check("run -itw /a b", &Some("/a".to_owned()), name);
    }

    #[test]
    fn options_after_an_image_belong_to_its_program() {
        let check = |line: &str, expect: Option<&str>| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let mut command = crate::verbs::command();
            let _parsed = command.try_get_matches_from_mut(&words);
            let found = end_options(&command, &words).map(|it| {
                let texts: Vec<_> = it.iter().map(|it| it.to_string_lossy()).collect();
                texts.join(" ")
            });
            assert_eq!(found.as_deref(), expect, "{line}");
        };
        check("quire run a --help", Some("quire run a -- --help"));
        check("quire --store x run -it a --json b", Some("quire --store x run -it a -- --json b"));
        check("quire run a -- --help", None);
        check("quire run a sh --help", None);
        check("quire run -- a --help", None);
        check("quire run -it a", None);
        check("quire bundle a b -v", Some("quire bundle a b -- -v"));
        check("quire exec a -it b", Some("quire exec a -- -it b"));
        check("quire exec -it a b -c", None);
        check("quire images --help", None);
    }
}
