//! A verb for tests only. It shows that a verb needs one file and two lines: `mod` and a row of the table.

use clap::Args;

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Example {
    /// A word
    #[arg(long, value_name = "WORD")]
    pub(crate) word: Option<String>,
}

impl VerbArgs for Example {
    const NAME: &'static str = "example";
    const ALIAS: Option<&'static str> = Some("sample");
    const ABOUT: &'static str = "Show how a verb is added";
    const DETAILS: &'static str = "It does nothing.";
    const EXAMPLES: &'static str = "quire example --word one";
    const PRINTS_JSON: bool = false;

    fn call(&self, _: &Context) -> anyhow::Result<Answer> {
        Ok(if self.word.is_some() { Answer::Yes } else { Answer::No })
    }
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use crate::verbs::{self, Cli};

    #[test]
    fn a_verb_is_one_file_and_two_lines() {
        // The verb can be called by its name and its alias, and its row has no JSON.
        for name in ["example", "sample"] {
            let words = ["quire", name, "--word", "one"];
            let matches = verbs::command().try_get_matches_from(words).unwrap();
            let cli = Cli::from_arg_matches(&matches).unwrap();
            assert_eq!((cli.verb.row().name, cli.verb.row().prints_json), ("example", false));
        }
        let mut command = verbs::help::explained();
        let all = command.render_help().to_string();
        assert!(all.contains("example      Show how a verb is added [alias: sample]"), "{all}");
        let verb = command.find_subcommand_mut("example").unwrap();
        let long = verb.render_long_help().to_string();
        for expect in [
            "Show how a verb is added\n\nIt does nothing.",
            "quire example --word one",
            "Exit codes",
        ] {
            assert!(long.contains(expect), "{long}");
        }
        let mut script = Vec::new();
        clap_complete::generate(
            clap_complete::Shell::Bash,
            &mut verbs::command(),
            "quire",
            &mut script,
        );
        assert!(String::from_utf8(script).unwrap().contains("--word"));
        let pages = verbs::store::man_pages::pages();
        assert!(pages.iter().any(|it| it.name == "quire-example"));
    }
}
