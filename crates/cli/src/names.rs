//! `tag` and `rm`: names of images.

use container::life::known::{self, IfRunning, KnownError};
use oci::reference::Reference;
use store::{Form, OpenOptions, RefError, RefName, ResolveError, Resolved, Store};

use crate::Answer;
use crate::args;
use crate::context::{Context, now};
use crate::resolve::{LIST, Neither, meant, resolve};

pub(crate) fn tag(context: &Context, args: &args::Tag) -> anyhow::Result<Answer> {
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

pub(crate) fn rm(context: &Context, args: &args::Rm) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    // All are looked for before any is removed.
    let (mut names, mut containers) = (Vec::new(), Vec::new());
    for text in &args.names {
        // What is an image, too, is the container, as with podman: `rmi` removes the other.
        if args.container || store.containers.get(text)?.is_some() {
            if args.container && !args.force {
                known::find(&store, text)?;
            }
            containers.push(text);
            continue;
        }
        let found = image_name(&store, text, args.force);
        names.extend(found.map_err(|error| neither(&store, text, error))?);
    }
    for container in containers {
        let if_running = if args.force { IfRunning::Kill } else { IfRunning::Refuse };
        let is_removed = known::remove(&store, container, if_running, &|| now().0)?;
        // It was there, or is said to be.
        if !is_removed && !args.force {
            context.remark(&format!("container {container} is gone already"));
        }
    }
    remove_names(context, &store, &names)
}

pub(crate) fn rmi(context: &Context, args: &args::Rmi) -> anyhow::Result<Answer> {
    let store = context.open(OpenOptions::write())?;
    // All are looked for before any is removed.
    let names = args.names.iter().map(|text| image_names(&store, text, args.force));
    let names = names.collect::<anyhow::Result<Vec<_>>>()?.concat();
    remove_names(context, &store, &names)
}

/// The error of a name that neither a container nor an image has, with those of both that may be meant.
fn neither(store: &Store, text: &str, error: anyhow::Error) -> anyhow::Error {
    // A name that no image can have may be a container's.
    let Err(absent) = store.resolve(text) else { return error };
    let ResolveError::Absent { nearest: images, ids, .. } = &absent else { return error };
    let containers = match known::find(store, text) {
        Ok(found) => vec![found.id],
        Err(KnownError::Absent { nearest, .. }) => nearest,
        Err(error) => return error.into(),
    };
    let containers = containers.iter().map(|it| format!("container {it}"));
    let both: Vec<_> = containers.chain(images.iter().map(|it| format!("image {it}"))).collect();
    let hint = match both.is_empty() {
        true if !ids.is_empty() => meant(&absent).unwrap_or_default(),
        true => format!("`quire ps --all` lists all containers, and {LIST}"),
        false => format!("did you mean {}?", both.join(" or ")),
    };
    Neither { name: text.to_owned(), hint }.into()
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
