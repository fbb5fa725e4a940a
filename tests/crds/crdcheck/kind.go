package main

import (
	"context"
	"fmt"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apiextensions-apiserver/pkg/crdserverscheme"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	runtimeschema "k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// strategy is the part of the server's create and update strategy that validates.
type strategy interface {
	Validate(ctx context.Context, obj runtime.Object) field.ErrorList
	ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList
}

// kind validates the objects of one definition's first version.
type kind struct {
	schema   *schema.Structural
	strategy strategy
}

func newKind(crd *apiextensionsv1.CustomResourceDefinition) (*kind, error) {
	version := crd.Spec.Versions[0]
	internal := &apiextensions.JSONSchemaProps{}
	convert := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps
	if err := convert(version.Schema.OpenAPIV3Schema, internal, nil); err != nil {
		return nil, err
	}
	structural, err := schema.NewStructural(internal)
	if err != nil {
		return nil, err
	}
	objects, _, err := validation.NewSchemaValidator(internal)
	if err != nil {
		return nil, err
	}
	status := internal.Properties["status"]
	statuses, _, err := validation.NewSchemaValidator(&status)
	if err != nil {
		return nil, err
	}
	subresources := &apiextensions.CustomResourceSubresources{}
	if version.Subresources != nil {
		convert := apiextensionsv1.Convert_v1_CustomResourceSubresources_To_apiextensions_CustomResourceSubresources
		if err := convert(version.Subresources, subresources, nil); err != nil {
			return nil, err
		}
	}
	gvk := runtimeschema.GroupVersionKind{
		Group: crd.Spec.Group, Version: version.Name, Kind: crd.Spec.Names.Kind,
	}
	return &kind{structural, customresource.NewStrategy(
		crdserverscheme.NewUnstructuredObjectTyper(), true, gvk, objects, statuses,
		structural, subresources.Status, subresources.Scale, nil,
	)}, nil
}

// judge fills in the object's defaults and returns what the server would refuse it with.
func (k *kind) judge(object, old map[string]any) ([]string, error) {
	found := []string{}
	unknown, err := k.decode(object)
	if err != nil {
		return nil, err
	}
	for _, path := range unknown {
		found = append(found, fmt.Sprintf("unknown field %q", path))
	}
	var errs field.ErrorList
	if old == nil {
		created := &unstructured.Unstructured{Object: object}
		if created.GetNamespace() == "" {
			created.SetNamespace("default") // the request's path gives it
		}
		errs = k.strategy.Validate(context.Background(), created)
	} else {
		if _, err := k.decode(old); err != nil {
			return nil, err
		}
		before := &unstructured.Unstructured{Object: old}
		after := &unstructured.Unstructured{Object: object}
		before.SetNamespace(after.GetNamespace())
		before.SetResourceVersion("1")
		after.SetResourceVersion("1")
		errs = k.strategy.ValidateUpdate(context.Background(), after, before)
	}
	for _, err := range errs {
		found = append(found, err.Error())
	}
	return found, nil
}

// decode does to an object what the server does before validation; returns unknown fields' paths.
func (k *kind) decode(object map[string]any) ([]string, error) {
	metadata := objectmeta.ObjectMetaOptions{ReturnUnknownFieldPaths: true}
	_, _, unknown, err := objectmeta.GetObjectMetaWithOptions(object, metadata)
	if err != nil {
		return nil, err
	}
	options := schema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	unknown = append(unknown, pruning.PruneWithOptions(object, k.schema, true, options)...)
	defaulting.PruneNonNullableNullsWithoutDefaults(object, k.schema)
	defaulting.Default(object, k.schema)
	return unknown, nil
}
