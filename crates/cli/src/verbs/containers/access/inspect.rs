//! `inspect`: prints all settings and the state of containers and images, in podman's format.

pub(crate) mod inspected_container;
pub(crate) mod inspected_image;

use clap::{Args, ValueEnum};
use container::life::lookup::{KnownContainer, KnownError, find_container};
use serde_json::Value;
use store::{OpenOptions, Resolved, Store};

use crate::Answer;
use crate::output::{report, template};
use crate::session::context::Context;
use crate::session::resolve::{NoObject, resolve};
use crate::verbs::VerbArgs;
use crate::verbs::exit_codes::ExitCodes;

use inspected_container::InspectedContainerReport;
use inspected_image::InspectedImageReport;

/// The kind of thing that a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum InspectedType {
    /// A container, or else an image
    All,
    /// A container
    Container,
    /// An image
    Image,
}

#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Look the names up as this
    #[arg(short = 't', long = "type", value_name = "TYPE", value_enum, default_value_t = InspectedType::All)]
    pub(crate) kind: InspectedType,
    /// Print this Go template of each, such as {{.State.Status}}, or json
    #[arg(short, long, value_name = "TEMPLATE")]
    pub(crate) format: Option<String>,
    /// Accepted for older scripts: the size is always printed
    #[arg(short, long, hide = true)]
    pub(crate) size: bool,
    /// Print nothing: the exit code is 0 if there are such containers or images, and 1 if not
    #[arg(long, hide = true)]
    pub(crate) exists: bool,
    /// Names or ids of containers and images
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
}

impl VerbArgs for Inspect {
    const NAME: &'static str = "inspect";
    const ABOUT: &'static str = "Print the settings and the state of containers and images";
    const DETAILS: &'static str = "The output is a JSON list in the format of podman, with the fields that Quire has. If a \
        container and an image have the name, the container is printed. `quire show` describes an image for people, and \
        has its signatures and its forms.";
    const EXAMPLES: &'static str = "quire inspect web\n  quire inspect --format '{{.State.Status}}' web\n  quire inspect --type image debian";
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        inspect(context, self)
    }
}

fn inspect(context: &Context, args: &Inspect) -> anyhow::Result<Answer> {
    let own = context.open_for(OpenOptions::read(), true)?;
    if args.exists {
        for name in &args.names {
            if find(context, own.as_ref(), args.kind, name)?.is_none() {
                return Ok(Answer::No);
            }
        }
        return Ok(Answer::Yes);
    }
    let mut found = Vec::new();
    let mut missing = None;
    for name in &args.names {
        match find(context, own.as_ref(), args.kind, name)? {
            Some(object) => found.push(object.describe(context)?),
            None => missing = missing.or(Some(name)),
        }
    }
    print(args.format.as_deref(), &found)?;
    // As by podman, the others are printed all the same.
    match missing {
        Some(name) => Err(NoObject { name: name.clone(), kind: args.kind.word() }.into()),
        None => Ok(Answer::Yes),
    }
}

impl InspectedType {
    const fn word(self) -> &'static str {
        match self {
            Self::All => "container or image",
            Self::Container => "container",
            Self::Image => "image",
        }
    }
}

fn print(format: Option<&str>, found: &[Value]) -> anyhow::Result<()> {
    match format {
        None | Some("") => report::json(&found),
        Some(format) if template::is_json(format) => report::json(&found),
        Some(_) if found.is_empty() => Ok(()),
        Some(format) => template::print(&template::list(&normalized(format), found, &[])?),
    }
}

/// Replaces names of fields that podman accepts in templates besides those of its JSON. Source: podman,
/// `cmd/podman/inspect/inspect.go`, `inspectNormalize`, and Go's names of the fields `Id`.
fn normalized(format: &str) -> String {
    let mut text = format.replace(".Src", ".Source").replace(".Dst", ".Destination");
    for (name, field) in [(".ImageID", ".Image"), (".ID", ".Id")] {
        let mut rest = text.as_str();
        let mut replaced = String::new();
        while let Some((before, after)) = rest.split_once(name) {
            let is_longer = after.starts_with(|it: char| it.is_alphanumeric() || it == '_');
            replaced.push_str(before);
            replaced.push_str(if is_longer { name } else { field });
            rest = after;
        }
        replaced.push_str(rest);
        text = replaced;
    }
    text
}

/// A container or an image.
enum FoundObject {
    Container(Box<KnownContainer>),
    Image(Box<(Store, Resolved)>),
}

impl FoundObject {
    fn describe(&self, context: &Context) -> anyhow::Result<Value> {
        Ok(match self {
            Self::Container(known) => {
                serde_json::to_value(InspectedContainerReport::new(context, known))?
            }
            Self::Image(found) => {
                serde_json::to_value(InspectedImageReport::new(&found.0, &found.1)?)?
            }
        })
    }
}

/// Finds a container or an image; `None` if there is none of this name.
fn find(
    context: &Context,
    own: Option<&Store>,
    kind: InspectedType,
    name: &str,
) -> anyhow::Result<Option<FoundObject>> {
    if let (InspectedType::All | InspectedType::Container, Some(own)) = (kind, own) {
        match find_container(own, name) {
            Ok(known) => return Ok(Some(FoundObject::Container(Box::new(known)))),
            Err(KnownError::Absent { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if kind == InspectedType::Container || (own.is_none() && context.shared().is_empty()) {
        return Ok(None);
    }
    let store = context.open_with(name)?;
    match resolve(&store, name) {
        Ok(found) => Ok(Some(FoundObject::Image(Box::new((store, found))))),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_podmans_other_names() {
        for (format, expect) in [
            ("{{.ID}} {{.Name}}", "{{.Id}} {{.Name}}"),
            ("{{ .ID }}{{.IDMappings}}{{.ID}}", "{{ .Id }}{{.IDMappings}}{{.Id}}"),
            ("{{.ImageID}}", "{{.Image}}"),
            ("{{range .Mounts}}{{.Dst}}{{end}}", "{{range .Mounts}}{{.Destination}}{{end}}"),
            ("{{.State.Status}}", "{{.State.Status}}"),
        ] {
            assert_eq!(normalized(format), expect);
        }
    }
}
