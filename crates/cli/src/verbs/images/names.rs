//! `tag` and `rmi`: names of images; `rm`: containers.

use clap::Args;
use container::life::known::{self, IfRunning, KnownError};
use oci::reference::Reference;
use store::{Form, OpenOptions, RefError, RefName, Resolved, Store};

use crate::Answer;
use crate::session::context::{Context, now};
use crate::session::resolve::{NoContainer, resolve};
use crate::verbs::VerbArgs;

#[derive(Debug, Args)]
pub(crate) struct Tag {
    /// A name, an image id or its first digits (6 or more)
    pub(crate) name: String,
    /// The new name
    pub(crate) new: String,
}

impl VerbArgs for Tag {
    const NAME: &'static str = "tag";
    const ABOUT: &'static str = "Give an image another name";
    const EXAMPLES: &'static str = "quire tag app app:stable";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        tag(context, self)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// Containers
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Accepted for older scripts: only containers are removed in any case
    #[arg(long, hide = true)]
    pub(crate) container: bool,
    /// Kill running containers, and ignore names that do not exist
    #[arg(short, long)]
    pub(crate) force: bool,
}

impl VerbArgs for Rm {
    const NAME: &'static str = "rm";
    const ABOUT: &'static str = "Remove containers";
    const EXAMPLES: &'static str = "quire rm web\n  quire rm --force web db";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        rm(context, self)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Rmi {
    /// Names of images
    #[arg(required = true)]
    pub(crate) names: Vec<String>,
    /// Ignore names that do not exist
    #[arg(short, long)]
    pub(crate) force: bool,
}

impl VerbArgs for Rmi {
    const NAME: &'static str = "rmi";
    const ABOUT: &'static str = "Remove names of images; `gc` then frees the space";
    const EXAMPLES: &'static str = "quire rmi app:old";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        rmi(context, self)
    }
}

pub(crate) fn tag(context: &Context, args: &Tag) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    let found = resolve(&store, &args.name)?;
    let new: RefName = args.new.parse()?;
    let form = match &found.name {
        Some(name) => store.refs.get(name)?.map(|it| it.form),
        // It may lack something, and can have a name all the same.
        None => store.open_image(&found.image).ok().map(|it| it.form),
    };
    let reference = store::Reference {
        image: found.image,
        manifest: found.manifest,
        form: form.unwrap_or(Form::Objects),
        created: now(),
    };
    store.set_ref(&new, &reference)?;
    Ok(Answer::Yes)
}

/// Whether Docker would take `text` for `whole`; an image's id is short for nothing.
fn is_short_for(text: &str, whole: &RefName) -> bool {
    text.parse::<Reference>().is_ok_and(|reference| {
        let tag = reference.tag().unwrap_or("latest");
        reference.digest().is_none() && whole.as_str() == format!("{}:{tag}", reference.name())
    })
}

pub(crate) fn rm(context: &Context, args: &Rm) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), args.force)? else {
        return Ok(Answer::Yes);
    };
    if !args.force {
        // All are looked for before any is removed.
        for text in &args.names {
            known::find(&store, text).map_err(|error| absent(&store, text, error))?;
        }
    }
    for container in &args.names {
        let if_running = if args.force { IfRunning::Kill } else { IfRunning::Refuse };
        let is_removed = known::remove(&store, container, if_running, &|| now().0)?;
        if is_removed {
            continue;
        }
        if !args.force {
            // It was there just now.
            context.remark(&format!("container {container} is gone already"));
        } else if let Some(name) = image_name(&store, container, true).ok().flatten() {
            context.remark(&format!(
                "{name} is an image, and stays: `quire rmi {name}` removes its name"
            ));
        }
    }
    Ok(Answer::Yes)
}

pub(crate) fn rmi(context: &Context, args: &Rmi) -> anyhow::Result<Answer> {
    let Some(store) = context.open_for(OpenOptions::write(), args.force)? else {
        return Ok(Answer::Yes);
    };
    // All are looked for before any is removed.
    let names = args.names.iter().map(|text| image_names(&store, text, args.force));
    let names = names.collect::<anyhow::Result<Vec<_>>>()?.concat();
    remove_names(context, &store, &names)
}

/// The error of a name that no container has, with the images and containers that may be meant.
fn absent(store: &Store, text: &str, error: KnownError) -> anyhow::Error {
    let KnownError::Absent { nearest, .. } = &error else { return error.into() };
    let hint = match image_name(store, text, false) {
        Ok(Some(name)) => format!("{name} is an image: `quire rmi {name}` removes its name"),
        _ if nearest.is_empty() => "`quire ps --all` lists all containers".to_owned(),
        _ => format!("did you mean {}?", nearest.join(" or ")),
    };
    NoContainer { name: text.to_owned(), hint }.into()
}

/// The names that `text` means, which may be an image's id, as `images -q` prints them.
fn image_names(store: &Store, text: &str, force: bool) -> anyhow::Result<Vec<RefName>> {
    let is_name = text.parse().is_ok_and(|name| !matches!(store.refs.get(&name), Ok(None)));
    let is_id = |id: &str| !is_name && id.starts_with(&text.to_ascii_lowercase());
    let id = store.resolve(text).ok().map(|it| it.image).filter(|it| is_id(&it.to_string()));
    let Some(id) = id else {
        return Ok(image_name(store, text, force)?.into_iter().collect());
    };
    let (refs, _) = store.refs.readable()?;
    let names = refs.into_iter().filter(|(_, it)| it.image == id).map(|(name, _)| name);
    let names: Vec<_> = names.collect();
    if names.is_empty() && !force {
        anyhow::bail!("\"{text}\" is an image, not a name: nothing to remove");
    }
    if names.len() > 1 && !force {
        let names: Vec<_> = names.iter().map(RefName::as_str).collect();
        anyhow::bail!(
            "image \"{text}\" has several names: give those to remove, or --force for all: {}",
            names.join(", ")
        );
    }
    Ok(names)
}

/// The name of an image that `text` means; none if it is not there, and need not be.
fn image_name(store: &Store, text: &str, force: bool) -> anyhow::Result<Option<RefName>> {
    let name: RefName = match text.parse::<RefName>() {
        // What was pulled is called by its whole reference.
        Ok(name) if !matches!(store.refs.get(&name), Ok(None)) => name,
        name => match resolve(store, text) {
            Ok(Resolved { name: Some(whole), .. }) if is_short_for(text, &whole) => whole,
            _ => name?,
        },
    };
    // One whose record is damaged is there too, and to be rid of it is a reason to remove it.
    match store.refs.get(&name) {
        Ok(None) if force => Ok(None),
        Ok(None) => {
            // The usual error of a name that is not there knows the names that are alike.
            store.resolve(text)?;
            anyhow::bail!("\"{text}\" is an image, not a name: nothing to remove");
        }
        Err(error @ RefError::Disk(_)) => Err(error.into()),
        Ok(Some(_)) | Err(_) => Ok(Some(name)),
    }
}

fn remove_names(context: &Context, store: &Store, names: &[RefName]) -> anyhow::Result<Answer> {
    for name in names {
        match store.remove_ref(name) {
            // Named twice, or removed by somebody else since.
            Err(RefError::Absent(_)) => {}
            result => {
                result?;
            }
        }
    }
    if !names.is_empty() {
        context.remark("names removed; `quire gc` frees unused data");
    }
    Ok(Answer::Yes)
}
