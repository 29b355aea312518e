//! The rules of layers once more, as slowly and plainly as possible, to compare with: maps from paths, no symlinks.

use std::collections::BTreeMap;

pub(super) type Path = String;

/// One entry of a tar.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Directory { path: Path, uid: u32 },
    File { path: Path, uid: u32 },
    Link { path: Path, target: Path },
    Whiteout { path: Path },
    Opaque { directory: Path },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    /// `None` when no layer describes it.
    Directory(Option<u32>),
    /// Two names of one file have one number.
    File { uid: u32, inode: usize },
    /// Not known yet: the number in the layer's `links`.
    Link(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refused;

/// The root is "", and always there.
pub(super) type Tree = BTreeMap<Path, Node>;

pub(super) fn empty() -> Tree {
    BTreeMap::from([(String::new(), Node::Directory(None))])
}

#[derive(Debug)]
pub(super) struct Layer {
    tree: Tree,
    whiteouts: Vec<Path>,
    opaques: Vec<Path>,
    links: Vec<Path>,
}

pub(super) fn parents(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(at, _)| &path[..at])
}

fn remove(tree: &mut Tree, path: &str) {
    tree.remove(path);
    clear(tree, path);
}

fn clear(tree: &mut Tree, directory: &str) {
    let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
    tree.retain(|path, _| path.is_empty() || !path.starts_with(&prefix));
}

impl Layer {
    pub(super) fn new() -> Self {
        Self { tree: empty(), whiteouts: Vec::new(), opaques: Vec::new(), links: Vec::new() }
    }

    pub(super) fn add(&mut self, op: &Op, inode: usize) -> Result<(), Refused> {
        if let Op::Directory { path, .. } | Op::File { path, .. } | Op::Link { path, .. } = op {
            self.make_parents(path)?;
        }
        let (path, node) = match op {
            Op::Whiteout { path } => {
                self.whiteouts.push(path.clone());
                return Ok(());
            }
            Op::Opaque { directory } => {
                self.opaques.push(directory.clone());
                return Ok(());
            }
            Op::Directory { path, uid } => (path, Node::Directory(Some(*uid))),
            Op::File { path, uid } => (path, Node::File { uid: *uid, inode }),
            Op::Link { path, target } => match self.tree.get(target) {
                Some(Node::Directory(_)) => return Err(Refused),
                Some(found) => (path, found.clone()),
                None => {
                    self.links.push(target.clone());
                    (path, Node::Link(self.links.len() - 1))
                }
            },
        };
        if !(is_directory(&node) && self.tree.get(path).is_some_and(is_directory)) {
            remove(&mut self.tree, path);
        }
        self.tree.insert(path.clone(), node);
        Ok(())
    }

    fn make_parents(&mut self, path: &str) -> Result<(), Refused> {
        if parents(path).any(|it| matches!(self.tree.get(it), Some(it) if !is_directory(it))) {
            return Err(Refused);
        }
        for parent in parents(path) {
            self.tree.entry(parent.to_owned()).or_insert(Node::Directory(None));
        }
        Ok(())
    }

    fn resolve(&self, lower: &Tree, target: &str, steps: usize) -> Result<Node, Refused> {
        match lower.get(target).or_else(|| self.tree.get(target)) {
            _ if steps > self.links.len() => Err(Refused),
            None | Some(Node::Directory(_)) => Err(Refused),
            Some(Node::Link(next)) => self.resolve(lower, &self.links[*next], steps + 1),
            Some(file) => Ok(file.clone()),
        }
    }

    pub(super) fn onto(self, lower: &Tree) -> Result<Tree, Refused> {
        let mut tree = lower.clone();
        for path in &self.whiteouts {
            remove(&mut tree, path);
        }
        for directory in &self.opaques {
            if tree.get(directory).is_some_and(is_directory) {
                clear(&mut tree, directory);
            }
        }
        for (path, node) in &self.tree {
            let node = match node {
                Node::Link(link) => self.resolve(lower, &self.links[*link], 0)?,
                other => other.clone(),
            };
            match (&node, tree.get(path)) {
                (Node::Directory(None), Some(Node::Directory(_))) => continue,
                (Node::Directory(None), Some(_)) => return Err(Refused),
                (Node::Directory(_), Some(Node::Directory(_))) => {}
                _ => remove(&mut tree, path),
            }
            tree.insert(path.clone(), node);
        }
        Ok(tree)
    }
}

fn is_directory(node: &Node) -> bool {
    matches!(node, Node::Directory(_))
}
