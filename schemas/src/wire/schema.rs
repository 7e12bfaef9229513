//! A writer's schema, compiled for reading.
//!
//! Takes an Avro schema and gives a tree in which named types are resolved and metric fields carry their metric, so
//! that the decoder walks the writer's fields in the writer's order, keeps what it knows by name and steps over the
//! rest. That is Avro's schema resolution for the changes that FULL_TRANSITIVE allows: fields come and go.

use std::collections::HashMap;
use std::sync::Arc;

use apache_avro::Schema;

use super::DecodeError;
use super::bytes::Cursor;
use crate::metric::Metric;

/// How deep types may nest; ours nest four deep.
const MAX_DEPTH: usize = 16;

#[derive(Clone, Debug)]
pub(crate) enum Node {
    Null,
    Boolean,
    /// Int, long and every logical type over them.
    Long,
    Float,
    Double,
    Text,
    Bytes,
    Fixed(usize),
    Enum(Arc<[String]>),
    Array(Arc<Node>),
    Map(Arc<Node>),
    Union(Arc<[Node]>),
    Record(Arc<RecordNode>),
}

#[derive(Debug)]
pub(crate) struct RecordNode {
    /// Without the name space, which holds the version.
    pub(crate) name: String,
    pub(crate) fields: Vec<FieldNode>,
}

#[derive(Debug)]
pub(crate) struct FieldNode {
    pub(crate) name: String,
    pub(crate) metric: Option<Metric>,
    pub(crate) node: Node,
}

/// Compiles a record schema; says what in it is not supported.
pub(crate) fn compile(schema: &Schema) -> Result<Arc<RecordNode>, String> {
    match Compiler::default().node(schema, 0)? {
        Node::Record(record) => Ok(record),
        _ => Err("the schema is no record".to_owned()),
    }
}

#[derive(Default)]
struct Compiler {
    named: HashMap<String, Node>,
}

impl Compiler {
    fn node(&mut self, schema: &Schema, depth: usize) -> Result<Node, String> {
        if depth > MAX_DEPTH {
            return Err(format!("types nest deeper than {MAX_DEPTH}"));
        }
        Ok(match schema {
            Schema::Null => Node::Null,
            Schema::Boolean => Node::Boolean,
            Schema::Int | Schema::Long | Schema::TimestampMicros | Schema::TimestampMillis | Schema::Date => Node::Long,
            Schema::Float => Node::Float,
            Schema::Double => Node::Double,
            Schema::String => Node::Text,
            Schema::Bytes => Node::Bytes,
            Schema::Array(array) => Node::Array(Arc::new(self.node(&array.items, depth + 1)?)),
            Schema::Map(map) => Node::Map(Arc::new(self.node(&map.types, depth + 1)?)),
            Schema::Union(union) => {
                let branches: Result<Vec<_>, _> = union.variants().iter().map(|s| self.node(s, depth + 1)).collect();
                Node::Union(branches?.into())
            }
            Schema::Enum(symbols) => self.name(&symbols.name.to_string(), Node::Enum(symbols.symbols.clone().into())),
            Schema::Fixed(fixed) => self.name(&fixed.name.to_string(), Node::Fixed(fixed.size)),
            Schema::Record(record) => {
                let fields: Result<Vec<_>, String> = record
                    .fields
                    .iter()
                    .map(|field| {
                        Ok(FieldNode {
                            name: field.name.clone(),
                            metric: Metric::by_name(&field.name),
                            node: self.node(&field.schema, depth + 1)?,
                        })
                    })
                    .collect();
                let name = record.name.name().to_owned();
                let node = Node::Record(Arc::new(RecordNode { name, fields: fields? }));
                self.name(&record.name.to_string(), node)
            }
            Schema::Ref { name } => self
                .named
                .get(&name.to_string())
                .cloned()
                .ok_or_else(|| format!("the type {name} is used before it is defined"))?,
            other => return Err(format!("the type {other:?} is not supported")),
        })
    }

    fn name(&mut self, name: &str, node: Node) -> Node {
        self.named.insert(name.to_owned(), node.clone());
        node
    }
}

impl Node {
    /// Steps over one value.
    pub(crate) fn skip(&self, cursor: &mut Cursor<'_>) -> Result<(), DecodeError> {
        match self {
            Node::Null => {}
            Node::Boolean => drop(cursor.boolean()?),
            Node::Long | Node::Enum(_) => drop(cursor.long()?),
            Node::Float => drop(cursor.float()?),
            Node::Double => drop(cursor.double()?),
            Node::Text | Node::Bytes => drop(cursor.bytes()?),
            Node::Fixed(size) => drop(cursor.take(*size)?),
            Node::Array(items) => loop {
                let count = cursor.block()?;
                if count == 0 {
                    break;
                }
                for _ in 0..count {
                    items.skip(cursor)?;
                }
            },
            Node::Map(values) => loop {
                let count = cursor.block()?;
                if count == 0 {
                    break;
                }
                for _ in 0..count {
                    cursor.bytes()?;
                    values.skip(cursor)?;
                }
            },
            Node::Union(_) => self.branch(cursor)?.skip(cursor)?,
            Node::Record(record) => {
                for field in &record.fields {
                    field.node.skip(cursor)?;
                }
            }
        }
        Ok(())
    }

    /// Of a union the branch that was written, else the node itself.
    #[inline]
    pub(crate) fn branch(&self, cursor: &mut Cursor<'_>) -> Result<&Node, DecodeError> {
        match self {
            Node::Union(branches) => usize::try_from(cursor.long()?)
                .ok()
                .and_then(|branch| branches.get(branch))
                .ok_or(DecodeError::Malformed("a union has no such branch")),
            node => Ok(node),
        }
    }
}
